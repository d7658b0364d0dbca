"""From rewards to advantages, in plain torch: no model, no DeepSpeed, no files here.

References: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740; REINFORCE++, arXiv 2501.03262;
GAE, arXiv 1506.02438; DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-12
"""Rewards of a group that differ by no more than this, relatively, are equal: divided by the std, their rounding errors would
become advantages."""
WHITENING_EPSILON = 1e-8
"""Added to the variance that advantages are whitened by."""


def group_advantages(rewards: Tensor) -> Tensor:
    """A_i = (R_i − mean(R)) / std(R) over one prompt's samples (GRPO §4.1.2; DAPO eq. 9), std unbiased.

    ``rewards``: float [n]. Returns [n]; zeros if the rewards are all equal or n < 2. Raises ValueError on NaN or infinity.
    """
    centered = group_mean_advantages(rewards)
    return centered / rewards.std(unbiased=True) if bool(centered.any()) else centered


def group_mean_advantages(rewards: Tensor) -> Tensor:
    """A_i = R_i − mean(R) over one prompt's samples: no division by the std, which favours prompts that are nearly always or
    never solved (Dr. GRPO §3.2). ``rewards``: float [n]. Returns and raises as ``group_advantages``."""
    _check_finite(rewards)
    if rewards.numel() < 2 or bool(rewards.max() - rewards.min() <= ROUNDING * rewards.abs().max()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """A_i = R_i − (1 / (n − 1)) · Σ_{j≠i} R_j over one prompt's samples (RLOO) = n / (n − 1) · (R_i − mean(R)).

    ``rewards``: float [n]. Returns and raises as ``group_advantages``."""
    n = rewards.numel()
    return group_mean_advantages(rewards) * (n / max(n - 1, 1))


GROUP_ADVANTAGES = {
    "group": group_advantages,
    "group_mean": group_mean_advantages,
    "leave_one_out": leave_one_out_advantages,
}
"""Those that need one group alone, by their names in ``trainer.advantage``."""


def batch_advantages(rewards: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> list[Tensor]:
    """A = (R − mean of its group), then whitened over all trained tokens of the batch (REINFORCE++ with
    baseline): each sample weighs in mean and variance as many times as it has tokens.

    ``rewards``: float [n_g] of each group g; ``lengths``: trained tokens of each of these samples, 0 for one that is filtered
    out. Returns [n_g] of each group. Raises ValueError on rewards that are not finite and on lists that do not fit."""
    centered = [group_mean_advantages(group) for group in rewards]
    if [len(group) for group in centered] != [len(group) for group in lengths]:
        raise ValueError("batch_advantages needs one length per reward")
    if not centered:
        return []
    flat = torch.cat(centered)
    counts = torch.tensor([n for group in lengths for n in group], dtype=flat.dtype, device=flat.device)
    return list(whiten(flat, Moments.of(flat, counts)).split([len(group) for group in centered]))


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of numbers; those of micro-batches and ranks are added with ``+``."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, counts: Tensor | None = None) -> Moments:
        """``values``: float [n]; ``counts``: how often each is there, float [n], default once."""
        values = values.detach().double()
        counts = torch.ones_like(values) if counts is None else counts.double()
        return cls(float(counts.sum()), float((counts * values).sum()), float((counts * values * values).sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1.0)

    @property
    def variance(self) -> float:
        """Unbiased; 0 below two numbers."""
        if self.count < 2:
            return 0.0
        return max(self.squares - self.count * self.mean**2, 0.0) / (self.count - 1.0)


def whiten(values: Tensor, moments: Moments | None = None) -> Tensor:
    """(x − mean) / sqrt(variance + 1e-8), variance unbiased; of one number: 0. ``values``: float [n]. ``moments``: those of the
    whole batch where ``values`` is only a part of it; default: those of ``values``. Returns float [n], no gradient."""
    moments = Moments.of(values) if moments is None else moments
    return (values.detach() - moments.mean) / (moments.variance + WHITENING_EPSILON) ** 0.5


def gae(
    rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained tokens of each sequence (GAE eq. 16; PPO eq. 11 and 12)

        δ_t = r_t + γ V_{t+1} − V_t,   A_t = δ_t + γ λ A_{t+1},   returns_t = A_t + V_t,   both 0 behind the last token

    ``rewards``, ``values``: float [N], of trained tokens alone, those of a sequence in their order: what the environment wrote
    between two turns is no step of the policy. ``sequences``: int64 [N], each token's sequence. Returns (advantages, returns), float
    [N], without gradient; advantages are not whitened. Raises ValueError on rewards or values that are not finite.
    """
    _check_finite(rewards)
    _check_finite(values, "values")
    numbers, steps = values.detach().double().tolist(), rewards.detach().double().tolist()
    advantages = [0.0] * len(numbers)
    ahead: dict[int, tuple[float, float]] = {}
    """Of each sequence: value and advantage of the token behind."""
    for t, sequence in reversed(list(enumerate(sequences.tolist()))):
        next_value, next_advantage = ahead.get(sequence, (0.0, 0.0))
        delta = steps[t] + gamma * next_value - numbers[t]
        advantages[t] = delta + gamma * lam * next_advantage
        ahead[sequence] = (numbers[t], advantages[t])
    found = torch.tensor(advantages, dtype=torch.float64)
    returns = found + values.detach().double().cpu()
    return found.to(values), returns.to(values)


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


def _check_finite(numbers: Tensor, name: str = "rewards") -> None:
    if not torch.isfinite(numbers).all():
        raise ValueError(f"{name} must be finite, got {numbers.tolist()}")
