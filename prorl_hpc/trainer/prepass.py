"""What the losses need from before a step's first update, computed on the very micro-batches that are trained.

Old logprobs (the proximal policy), logprobs of the reference model and old values are those of the weights that a step begins with,
however many updates it makes; generalised advantages follow from the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.advantages import Moments, gae, whiten
from prorl_hpc.trainer.batches import TrainingBatch
from prorl_hpc.trainer.layout import Row, collate


@dataclass
class Part:
    """One micro-batch of this rank, and what was computed about its N trained tokens before the first update: float32 [N] each, None
    where the settings do not ask for it."""

    rows: list[Row]
    chunks: int = 0
    """Of the output layer's calls, see ``Policy.forward``."""
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def longest_row(self) -> int:
        return max(map(len, self.rows))


@dataclass(frozen=True)
class AdvantageSpread:
    """Of the advantages that the loss sees, over trained tokens; parts of a batch are joined with ``+``."""

    moments: Moments = field(default_factory=Moments)
    least: float = float("inf")
    greatest: float = float("-inf")

    @classmethod
    def of(cls, advantages: Tensor, counts: Tensor | None = None) -> AdvantageSpread:
        """``advantages``: float [n]; ``counts``: how many tokens have each."""
        if not advantages.numel():
            return cls()
        return cls(Moments.of(advantages, counts), float(advantages.min()), float(advantages.max()))

    def __add__(self, other: AdvantageSpread) -> AdvantageSpread:
        return AdvantageSpread(
            self.moments + other.moments, min(self.least, other.least), max(self.greatest, other.greatest)
        )

    def metrics(self) -> dict[str, float]:
        return {
            "advantage_mean": self.moments.mean,
            "advantage_std": self.moments.variance**0.5,
            "advantage_min": self.least,
            "advantage_max": self.greatest,
        }


def batch_spread(batch: TrainingBatch) -> AdvantageSpread:
    """Of a whole batch whose samples have one advantage each; the tokens of samples left out have advantage 0."""
    numbers = [s.advantage for s in batch.samples] + [0.0] * len(batch.left_out)
    counts = [s.trained_tokens for s in batch.samples] + [s.trained_tokens for s in batch.left_out]
    return AdvantageSpread.of(torch.tensor(numbers, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))


def joined(spreads: Iterable[AdvantageSpread]) -> AdvantageSpread:
    return sum(spreads, start=AdvantageSpread())


def add_advantages(
    parts: Sequence[Part],
    config: TrainerConfig,
    device: torch.device,
    everybody: Callable[[AdvantageSpread], list[AdvantageSpread]],
) -> AdvantageSpread:
    """Give each part its generalised advantages, whitened over the trained tokens of the whole batch (all mini-batches, all ranks), and its
    returns, which are not. ``everybody`` gathers an object from all ranks. Returns what the loss sees, over all ranks."""
    keeps = []
    for part in parts:
        micro = collate(part.rows, device)
        values = _given(part.old_values)
        if not torch.isfinite(values).all():
            raise RunError(
                "the value head gave values that are not finite: training has diverged. Resume from an earlier checkpoint with a "
                "smaller trainer.value_learning_rate or trainer.learning_rate"
            )
        part.advantages, part.returns = gae(micro.rewards, values, micro.sequences, config.gae_gamma, config.gae_lambda)
        keeps.append(micro.weights > 0)

    def over_ranks() -> AdvantageSpread:
        own = [AdvantageSpread.of(_given(p.advantages)[keep]) for p, keep in zip(parts, keeps, strict=True)]
        return joined(everybody(joined(own)))

    moments = over_ranks().moments
    for part in parts:
        part.advantages = whiten(_given(part.advantages), moments)
    return over_ranks()


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
