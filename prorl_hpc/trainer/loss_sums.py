"""Numbers about a loss that can be added up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class LossSums:
    """Sums over the trained tokens that count; add those of micro-batches and ranks, then ask for ``means``. Names with ``_max``
    are maxima; ``loss`` is a sum of shares, its weights already divided by the whole batch."""

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    value_loss: float = 0.0
    value_clipped: float = 0.0
    correction: float = 0.0
    correction_max: float = 0.0
    correction_masked: float = 0.0
    logprob_gap: float = 0.0
    logprob_gap_max: float = 0.0

    @classmethod
    def of(cls, keep: Tensor, loss: Tensor, found: Mapping[str, Tensor]) -> LossSums:
        """Sums of the [N] tensors in ``found`` (named as the fields) over the tokens in ``keep``; one transfer from the device."""
        with torch.no_grad():
            kept = {name: torch.where(keep, x.detach(), 0.0) for name, x in found.items()}
            numbers = {"tokens": keep.sum(), "loss": loss.detach()} | {name: x.sum() for name, x in kept.items()}
            if keep.numel():
                numbers |= {f"{name}_max": kept[name].max() for name in ("correction", "logprob_gap") if name in kept}
            return cls(**dict(zip(numbers, torch.stack([x.double() for x in numbers.values()]).tolist(), strict=True)))

    def __iadd__(self, other: LossSums) -> LossSums:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name.endswith("_max") else mine + theirs)
        return self

    def means(self) -> dict[str, float]:
        """Per-token means, and the sum ``loss``. ``logprob_gap``: |trainer − engine|, of π_old where that is the trainer's, else of
        π_θ; in nats."""
        n = max(self.tokens, 1.0)
        return {
            "loss": self.loss,
            "ratio": self.ratio / n,
            "clip_fraction_low": self.clipped_low / n,
            "clip_fraction_high": self.clipped_high / n,
            "clip_fraction": (self.clipped_low + self.clipped_high) / n,
            "dual_clip_fraction": self.dual_clipped / n,
            "entropy": self.entropy / n,
            "kl": self.kl / n,
            "value_loss": self.value_loss / n,
            "value_clip_fraction": self.value_clipped / n,
            "correction_mean": self.correction / n,
            "correction_max": self.correction_max,
            "masked_fraction": self.correction_masked / n,
            "logprob_gap_mean": self.logprob_gap / n,
            "logprob_gap_max": self.logprob_gap_max,
        }
