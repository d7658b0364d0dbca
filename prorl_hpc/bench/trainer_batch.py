"""One fixed batch for any trainer: random tokens, their logprobs under the model, rewards that differ in every group."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from prorl_hpc.config.model_directory import vocab_size_of
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.trajectory import Finish, Segment, Trajectory

T = TypeVar("T")
_FIRST_PLAIN_TOKEN = 64
"""Those before are special ones in the small models."""


def vocabulary_of(model: Path) -> int:
    """Ids that the model in this directory knows. RunError if it does not say."""
    size = vocab_size_of(json.loads((model / "config.json").read_text()))
    if size is None:
        raise RunError(f"{model}/config.json has no vocab_size")
    return size


@dataclass(frozen=True)
class BatchSize:
    """Lengths are drawn evenly from these bounds, both included."""

    groups: int
    samples: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]


class FixedBatch(msgspec.Struct, frozen=True):
    """``prompts`` by group; ``completions``, ``rewards`` and ``logprobs`` by group and sample. ``logprobs``: of the completions'
    tokens."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: list[list[float]]
    logprobs: list[list[list[float]]]

    @classmethod
    def draw(cls, size: BatchSize, vocab_size: int, seed: int = 0) -> FixedBatch:
        """With the logprobs of a model that finds all tokens equally likely: see ``with_logprobs``."""
        dice = random.Random(seed)

        def tokens(bounds: tuple[int, int]) -> list[int]:
            return [dice.randrange(_FIRST_PLAIN_TOKEN, vocab_size) for _ in range(dice.randint(*bounds))]

        prompts = [tokens(size.prompt_tokens) for _ in range(size.groups)]
        completions = [[tokens(size.completion_tokens) for _ in range(size.samples)] for _ in prompts]
        rewards = [[dice.random() for _ in range(size.samples)] for _ in prompts]
        uniform = -math.log(vocab_size)
        logprobs = [[[uniform] * len(completion) for completion in group] for group in completions]
        return cls(prompts, completions, rewards, logprobs)

    def with_logprobs(self, logprobs: list[list[list[float]]]) -> FixedBatch:
        return msgspec.structs.replace(self, logprobs=logprobs)

    def shortened(self, share: int) -> FixedBatch:
        """The same samples with completions of one ``share``-th: to warm up with."""

        def cut(by_group: list[list[list[T]]]) -> list[list[list[T]]]:
            return [[values[: max(1, len(values) // share)] for values in group] for group in by_group]

        return msgspec.structs.replace(self, completions=cut(self.completions), logprobs=cut(self.logprobs))

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and completion of every sample, group by group."""
        groups = zip(self.prompts, self.completions, strict=True)
        return [prompt + completion for prompt, group in groups for completion in group]

    @property
    def tokens(self) -> int:
        """Real ones, each sample with its prompt; no padding."""
        return sum(map(len, self.sequences))

    @property
    def trained_tokens(self) -> int:
        return sum(len(completion) for group in self.completions for completion in group)

    @property
    def padded_length(self) -> int:
        """Of a row that holds any of the samples behind any of the prompts."""
        return max(map(len, self.prompts)) + max(len(c) for group in self.completions for c in group)

    def as_result(self) -> BatchResult:
        """As the rollout service delivers it."""
        groups = [self._group(index) for index in range(len(self.prompts))]
        n, rollouts = len(groups), sum(len(group.rollouts) for group in groups)
        progress = BatchProgress("bench", BatchState.DONE, n, n, 0, 0, 0, rollouts, 0, n)
        return BatchResult(progress, groups, 0.0)

    def _group(self, index: int) -> GroupResult:
        samples = zip(self.completions[index], self.logprobs[index], self.rewards[index], strict=True)
        name = f"bench.g{index}"
        rollouts = [
            RolloutResult(
                f"{name}.s{sample}",
                name,
                sample,
                "bench",
                Status.DONE,
                reward,
                trajectory=Trajectory(
                    [Segment(self.prompts[index]), Segment(ids, logprobs, trained=True, weight_version=0)],
                    finish=Finish.ANSWER,
                ),
                finish=Finish.ANSWER,
            )
            for sample, (ids, logprobs, reward) in enumerate(samples)
        ]
        return GroupResult(name, index, GroupOutcome.ACCEPTED, rollouts)
