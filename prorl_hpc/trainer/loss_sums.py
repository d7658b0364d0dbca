"""Numbers about a loss that can be added up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass
class LossSums:
    """Sums over the trained tokens that count; add those of micro-batches and ranks, then ask for ``means``. Names with ``_max``
    are maxima; ``loss`` is a sum of shares, its weights already divided by the whole batch. None: nothing was measured, which is not 0."""

    tokens: float = 0.0
    loss: float = 0.0
    gap_tokens: float = 0.0
    """Of which the gap to the engine was measured."""
    ratio: float | None = None
    ppo_kl: float | None = None
    clipped_low: float | None = None
    clipped_high: float | None = None
    dual_clipped: float | None = None
    entropy: float | None = None
    kl: float | None = None
    value_loss: float | None = None
    value_clipped: float | None = None
    correction: float | None = None
    correction_max: float | None = None
    correction_masked: float | None = None
    logprob_gap: float | None = None
    logprob_gap_max: float | None = None

    @classmethod
    def of(cls, keep: Tensor, loss: Tensor, found: Mapping[str, Tensor]) -> LossSums:
        """Sums of the [N] tensors in ``found`` (named as the fields) over the tokens in ``keep``; one transfer from the device."""
        if not keep.numel():
            return cls()
        with torch.no_grad():
            kept = {name: torch.where(keep, x.detach(), 0.0) for name, x in found.items()}
            numbers = {"tokens": keep.sum(), "loss": loss.detach()} | {name: x.sum() for name, x in kept.items()}
            numbers |= {f"{name}_max": kept[name].max() for name in ("correction", "logprob_gap") if name in kept}
            sums = cls(**dict(zip(numbers, torch.stack([x.double() for x in numbers.values()]).tolist(), strict=True)))
        if not sums.tokens:
            return cls()
        sums.gap_tokens = sums.tokens if sums.logprob_gap is not None else 0.0
        return sums

    def __iadd__(self, other: LossSums) -> LossSums:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None and theirs is not None:
                theirs = max(mine, theirs) if field.name.endswith("_max") else mine + theirs
            setattr(self, field.name, mine if theirs is None else theirs)
        return self

    def without_gap(self) -> LossSums:
        """The same as if the gap to the engine had not been measured."""
        return replace(self, gap_tokens=0.0, logprob_gap=None, logprob_gap_max=None)

    def means(self) -> dict[str, float]:
        """Per-token means, and the sum ``loss``; what was not measured is left out. ``ppo_kl``: log π_old − log π_θ.
        ``logprob_gap``: |trainer − engine|, of π_old where that is the trainer's, else of π_θ; in nats."""
        n, gaps = max(self.tokens, 1.0), max(self.gap_tokens, 1.0)
        clipped = None if self.clipped_low is None else self.clipped_low + (self.clipped_high or 0.0)
        sums = {
            "ratio": (self.ratio, n),
            "ppo_kl": (self.ppo_kl, n),
            "clip_fraction_low": (self.clipped_low, n),
            "clip_fraction_high": (self.clipped_high, n),
            "clip_fraction": (clipped, n),
            "dual_clip_fraction": (self.dual_clipped, n),
            "entropy": (self.entropy, n),
            "kl": (self.kl, n),
            "value_loss": (self.value_loss, n),
            "value_clip_fraction": (self.value_clipped, n),
            "correction_mean": (self.correction, n),
            "correction_max": (self.correction_max, 1.0),
            "masked_fraction": (self.correction_masked, n),
            "logprob_gap_mean": (self.logprob_gap, gaps),
            "logprob_gap_max": (self.logprob_gap_max, 1.0),
        }
        return {"loss": self.loss} | {name: total / by for name, (total, by) in sums.items() if total is not None}
