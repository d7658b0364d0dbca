"""What the losses need from before a step's first update, computed on the very micro-batches that are trained.

Old logprobs (the proximal policy), logprobs of the reference model and old values are those of the weights that a step begins with,
however many updates it makes; generalised advantages follow from the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.advantages import ROUNDING, Moments, gae, whiten
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
class AdvantageFigures:
    """Of advantages over trained tokens, those of the value head before they are whitened; parts of a batch are joined with ``+``.
    ``values`` and ``returns``: with a value head."""

    advantages: Moments = field(default_factory=Moments)
    least: float = float("inf")
    greatest: float = float("-inf")
    values: Moments = field(default_factory=Moments)
    returns: Moments = field(default_factory=Moments)

    @classmethod
    def of(cls, advantages: Tensor, counts: Tensor | None = None) -> AdvantageFigures:
        """``advantages``: float [n]; ``counts``: how many tokens have each."""
        if not advantages.numel():
            return cls()
        return cls(Moments.of(advantages, counts), float(advantages.min()), float(advantages.max()))

    def __add__(self, other: AdvantageFigures) -> AdvantageFigures:
        return AdvantageFigures(
            self.advantages + other.advantages,
            min(self.least, other.least),
            max(self.greatest, other.greatest),
            self.values + other.values,
            self.returns + other.returns,
        )

    def metrics(self) -> dict[str, float]:
        """``explained_variance``: 1 − Var(returns − values) / Var(returns); left out where all returns are equal."""
        found = {
            "advantage_mean": self.advantages.mean,
            "advantage_std": self.advantages.variance**0.5,
            "advantage_min": self.least,
            "advantage_max": self.greatest,
        }
        if self.values.count:
            found |= {"value_mean": self.values.mean, "return_mean": self.returns.mean}
            if self.returns.variance > ROUNDING * self.returns.squares / self.returns.count:
                # returns − values are the advantages, see ``gae``.
                found["explained_variance"] = 1.0 - self.advantages.variance / self.returns.variance
        return found


def batch_spread(batch: TrainingBatch) -> AdvantageFigures:
    """Of a whole batch whose samples have one advantage each; the tokens of samples left out have advantage 0."""
    numbers = [s.advantage for s in batch.samples] + [0.0] * len(batch.left_out)
    counts = [s.trained_tokens for s in batch.samples] + [s.trained_tokens for s in batch.left_out]
    return AdvantageFigures.of(torch.tensor(numbers, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))


def add_advantages(
    parts: Sequence[Part],
    config: TrainerConfig,
    device: torch.device,
    everybody: Callable[[AdvantageFigures], list[AdvantageFigures]],
) -> AdvantageFigures:
    """Give each part its generalised advantages, whitened over the trained tokens of the whole batch (all mini-batches, all ranks), and its
    returns, which are not. ``everybody`` gathers an object from all ranks. Returns what was found before whitening, over all ranks."""
    own = AdvantageFigures()
    for part in parts:
        micro = collate(part.rows, device)
        values = _given(part.old_values)
        if not torch.isfinite(values).all():
            raise RunError(
                "the value head gave values that are not finite: training has diverged. Resume from an earlier checkpoint with a "
                "smaller trainer.value_learning_rate or trainer.learning_rate"
            )
        part.advantages, part.returns = gae(micro.rewards, values, micro.sequences, config.gae_gamma, config.gae_lambda)
        keep = micro.weights > 0
        figures = AdvantageFigures.of(part.advantages[keep])
        own += replace(figures, values=Moments.of(values[keep]), returns=Moments.of(part.returns[keep]))
    figures = sum(everybody(own), start=AdvantageFigures())
    for part in parts:
        part.advantages = whiten(_given(part.advantages), figures.advantages)
    return figures


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
