"""Logprobs and entropies of tokens from their logits, in the logits' own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SLICE_NUMBERS = 1 << 22
"""Logits whose exponentials are held beside them at one time (16 MiB of float32)."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """``logits``: [n, V], any float type, **overwritten**; ``targets``: int64 [n]. Returns (logprobs with gradient, entropies in nats, with
    gradient if ``entropy_gradient``), float32 [n], of softmax(logits / temperature). float32 logits are worked on in place, others in one
    float32 copy; a gradient takes that memory again."""
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature, entropy_gradient)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is not analysed
    """With z = logits / T, p = softmax(z), H = −Σ p log p:

    ∂ log p_k / ∂z_j = [j = k] − p_j   and   ∂H / ∂z_j = −p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float()  # the same memory where they are float32
        if temperature != 1.0:
            scaled.div_(temperature)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for rows in _slices(scaled):
            z = scaled[rows]
            z.sub_(z.amax(-1, keepdim=True))
            weights = z.exp()
            total = weights.sum(-1)
            normalizer = total.log()
            logprobs[rows] = z.gather(-1, targets[rows, None])[:, 0] - normalizer
            # H = log Σ e^z − Σ e^z z / Σ e^z; the product is summed without being held.
            entropy[rows] = normalizer - torch.bmm(weights[:, None], z[:, :, None])[:, 0, 0] / total
            z.sub_(normalizer[:, None])
        ctx.save_for_backward(scaled, targets, entropy)
        ctx.temperature, ctx.entropy_gradient, ctx.dtype = temperature, entropy_gradient, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        for_logprobs, for_entropy = gradients
        log_p, targets, entropy = ctx.saved_tensors
        for rows in _slices(log_p):
            z, pull = log_p[rows], for_logprobs[rows, None]
            if ctx.entropy_gradient:
                push = for_entropy[rows, None]
                p = z.exp()
                z.add_(entropy[rows, None]).mul_(push).add_(pull).mul_(p).neg_()
            else:
                z.exp_().mul_(-pull)
            z.scatter_add_(-1, targets[rows, None], pull)
        gradient = log_p if ctx.temperature == 1.0 else log_p.div_(ctx.temperature)
        return gradient.to(ctx.dtype), None, None, None


def _slices(logits: Tensor) -> list[slice]:
    count, width = logits.shape
    rows = max(1, SLICE_NUMBERS // width)
    return [slice(start, start + rows) for start in range(0, count, rows)]
