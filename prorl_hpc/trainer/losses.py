"""DAPO in plain torch: advantages, the policy loss, length penalties and the numbers to watch.

References: DAPO, arXiv 2503.14476; GRPO, arXiv 2402.03300. No DeepSpeed, no model, no files here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log r| is cut here before exp, so that one token that the engine found impossible cannot make an infinity."""


def group_advantages(rewards: Tensor) -> Tensor:
    """A_i = (R_i − mean(R)) / std(R) over one prompt's samples (GRPO §4.1.2; DAPO eq. 9), std unbiased.

    ``rewards``: float [n]. Returns [n]; zeros if the rewards are all equal or n < 2. Raises ValueError on NaN or infinity.
    """
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    centered = rewards - rewards.mean()
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return centered / rewards.std(unbiased=True)


def soft_overlong_punishment(length: int, max_tokens: int, cache_tokens: int) -> float:
    """Added to the reward of a response of ``length`` tokens (DAPO eq. 13): 0 up to L_max − L_cache, then falling
    linearly to −1 at L_max = ``max_tokens``, and −1 beyond. ``cache_tokens`` 0 turns it off."""
    if cache_tokens == 0:
        return 0.0
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"the cache of {cache_tokens} tokens must lie between 1 and the longest response, {max_tokens} tokens"
        )
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - length) / cache_tokens))


@dataclass
class LossSums:
    """Sums over trained tokens; add those of micro-batches and ranks, then ask for ``means``."""

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    entropy: float = 0.0
    logprob_gap: float = 0.0
    logprob_gap_max: float = 0.0

    def __iadd__(self, other: LossSums) -> LossSums:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name == "logprob_gap_max" else mine + theirs)
        return self

    def means(self) -> dict[str, float]:
        """Per-token means; ``loss`` is a sum already divided by the global token count, ``logprob_gap_max`` a maximum."""
        n = max(self.tokens, 1.0)
        return {
            "loss": self.loss,
            "ratio": self.ratio / n,
            "clip_fraction_low": self.clipped_low / n,
            "clip_fraction_high": self.clipped_high / n,
            "clip_fraction": (self.clipped_low + self.clipped_high) / n,
            "entropy": self.entropy / n,
            "logprob_gap_mean": self.logprob_gap / n,
            "logprob_gap_max": self.logprob_gap_max,
        }


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    total_tokens: float,
    clip_low: float,
    clip_high: float,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Token-level clipped policy loss with clip-higher (DAPO eq. 8)

        L = − Σ_t mask_t · min(r_t A_t, clip(r_t, 1 − ε_low, 1 + ε_high) A_t) / total_tokens,   r = exp(logp − logp_old)

    All tensors have one shape (any). ``total_tokens`` counts the trained tokens of the *global* batch, of all ranks and
    micro-batches, so losses of the parts add up to the loss of the whole. Tokens with mask 0 count nowhere; an all-masked
    part gives 0. No KL term. Returns the scalar loss and detached sums for the statistics.
    """
    mask = mask.to(logprobs.dtype)
    # Masked entries may hold anything, even NaN: they are replaced, not multiplied away.
    keep = mask > 0
    log_ratio = torch.where(keep, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(keep, advantages, 0.0)
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(torch.minimum(plain, clipped) * mask).sum() / total_tokens
    with torch.no_grad():
        gap = log_ratio.abs()
        sums = LossSums(
            tokens=float(mask.sum()),
            loss=float(loss),
            ratio=float((ratio * mask).sum()),
            clipped_low=float(((advantages < 0) & (ratio < 1.0 - clip_low) & keep).sum()),
            clipped_high=float(((advantages > 0) & (ratio > 1.0 + clip_high) & keep).sum()),
            entropy=0.0 if entropy is None else float(torch.where(keep, entropy, 0.0).sum()),
            logprob_gap=float((gap * mask).sum()),
            logprob_gap_max=float((gap * mask).max()) if mask.numel() else 0.0,
        )
    return loss, sums
