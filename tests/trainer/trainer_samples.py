"""Samples with shared prompts, two turns and random tokens, the same for the same seed."""

from __future__ import annotations

import random

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer.batches import Sample, TrainingBatch


def training_samples(
    vocabulary: int = 300, groups: int = 3, size: int = 4, seed: int = 0, settings: TrainerConfig | None = None
) -> TrainingBatch:
    draw = random.Random(seed)
    samples = []
    for g in range(groups):
        prompt = [draw.randrange(vocabulary) for _ in range(6 + 3 * g)]
        for s in range(size):
            own = [draw.randrange(vocabulary) for _ in range(draw.randrange(6, 14))]
            mask = [True] * 3 + [False] * 2 + [True] * (len(own) - 5)
            logprobs = [-5.7 + draw.random() if m else 0.0 for m in mask]
            advantage = draw.choice([-1.2, 0.4, 0.9])
            samples.append(
                Sample(
                    f"g{g}.s{s}",
                    f"g{g}",
                    prompt + own,
                    [False] * len(prompt) + mask,
                    [0.0] * len(prompt) + logprobs,
                    advantage,
                    reward=float(advantage > 0),
                )
            )
    return TrainingBatch.of(samples, settings or TrainerConfig())
