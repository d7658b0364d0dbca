"""The losses of policy and value in plain torch, put together from pieces: no model, no DeepSpeed, no files here.

Every loss is a sum over trained tokens, Σ_t weight_t · loss_t. A token's weight is its share in the *whole* (mini-)batch
(``sequence_weights``), so the losses of the parts, however the batch is cut, add up to that of the whole.

References: PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; DAPO, arXiv 2503.14476; Dr. GRPO, arXiv 2503.20783; GSPO, arXiv
2507.18071; CISPO (MiniMax-M1), arXiv 2506.13585; dual clip, arXiv 1912.09729; decoupled PPO, arXiv 2110.00641, for language
models AReaL, arXiv 2505.24298; truncated importance sampling, https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer.loss_sums import LossSums

MAX_LOG_RATIO = 20.0
"""|log r| is cut here before exp, so that one token that the engine found impossible cannot make an infinity."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The same for GSPO's ratio of a sequence, a mean over tokens."""


@dataclass(frozen=True)
class TokenTerms:
    """The trained tokens of any part of a batch, float32 [N] unless said. A sequence is never split over parts."""

    logprobs: Tensor
    """log π_θ, with gradient."""
    old_logprobs: Tensor
    """log π_old of the ratio: the engine's, or the trainer's before the first update (``trainer.proximal``)."""
    advantages: Tensor
    weights: Tensor
    """Share in the whole batch's loss. 0: the token counts nowhere, and may hold anything, even NaN."""
    sequences: Tensor
    """int64 [N]: number of the token's sequence within this part, from 0."""
    engine_logprobs: Tensor | None = None
    """log π_engine, where ``old_logprobs`` are not the engine's."""
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """With gradient if ``entropy_coefficient`` is not 0."""
    values: Tensor | None = None
    """V_θ, with gradient."""
    old_values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class LossSettings:
    """What the loss is made of; meanings as in ``TrainerConfig``."""

    policy_loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    correction: str = "none"
    correction_cap: float = 2.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    value_clip: float = 0.2

    @classmethod
    def of(cls, config: TrainerConfig) -> LossSettings:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def sequence_weights(lengths: Sequence[int], aggregation: str, norm_tokens: int = 0) -> list[float]:
    """Weight of each token of sequence i in the loss of a batch of S sequences with ``lengths`` |o_i| trained tokens:

    - token_mean: 1 / Σ_j |o_j| (DAPO eq. 8)
    - seq_mean_token_sum: 1 / S
    - seq_mean_token_mean: 1 / (S · |o_i|) (GRPO eq. 3; GSPO eq. 5)
    - seq_mean_token_sum_norm: 1 / (S · ``norm_tokens``) (Dr. GRPO §3.2, its listing 1: a constant in place of lengths)

    Sequences of length 0 count nowhere and get 0. Raises ValueError for another name and for a constant below 1.
    """
    sequences, tokens = sum(n > 0 for n in lengths), sum(lengths)
    if aggregation == "seq_mean_token_sum_norm" and norm_tokens < 1:
        raise ValueError(f"seq_mean_token_sum_norm divides by a number of tokens of 1 or more, got {norm_tokens}")
    by_length = {
        "token_mean": [tokens for n in lengths],
        "seq_mean_token_sum": [sequences for n in lengths],
        "seq_mean_token_mean": [sequences * n for n in lengths],
        "seq_mean_token_sum_norm": [sequences * norm_tokens for n in lengths],
    }
    if aggregation not in by_length:
        raise ValueError(f"unknown aggregation {aggregation!r}: choose {', '.join(by_length)}")
    return [1.0 / share if n > 0 else 0.0 for n, share in zip(lengths, by_length[aggregation], strict=True)]


def training_loss(terms: TokenTerms, settings: LossSettings) -> tuple[Tensor, LossSums]:
    """Σ_t weight_t · (correction_t · policy_t + c_kl · kl_t − c_entropy · entropy_t + c_value · value_t), as PPO eq. 9 adds them up.

    Returns the scalar with gradient and detached sums for the statistics; an empty part, or one of weights 0, gives 0. Raises
    ValueError for a term that the settings ask for and ``terms`` lack.
    """
    keep = terms.weights > 0
    weights = torch.where(keep, terms.weights, 0.0)
    part = _kept(terms, keep)
    policy, found = _policy_losses(part, settings)
    correction = correction_weights(part, settings)
    total = correction * policy
    found["ppo_kl"] = (part.old_logprobs - part.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if settings.correction != "none":
        found["correction"] = correction
    if settings.correction in ("mask", "sequence_mask"):
        found["correction_masked"] = (correction == 0).float()
    if settings.kl_coefficient:
        found["kl"] = reference_kl(part.logprobs, _given(part.reference_logprobs, "reference_logprobs"))
        total = total + settings.kl_coefficient * found["kl"]
    if settings.entropy_coefficient:
        total = total - settings.entropy_coefficient * _given(part.entropy, "entropy")
    if part.entropy is not None:
        found["entropy"] = part.entropy
    if part.values is not None:
        values, returns = part.values, _given(part.returns, "returns")
        old_values = _given(part.old_values, "old_values")
        found["value_loss"], clipped = value_losses(values, old_values, returns, settings.value_clip)
        if settings.value_clip:
            found["value_clipped"] = clipped
        total = total + settings.value_coefficient * found["value_loss"]
    loss = (weights * total).sum()
    engine = part.old_logprobs if part.engine_logprobs is None else part.engine_logprobs
    now = part.logprobs if part.engine_logprobs is None else part.old_logprobs
    found["logprob_gap"] = (now - engine).abs()
    return loss, LossSums.of(keep, loss, found)


def _kept(terms: TokenTerms, keep: Tensor) -> TokenTerms:
    """The same with 0 in place of whatever the tokens hold that count nowhere: multiplied by 0, NaN would stay NaN."""

    def clean(name: str) -> Tensor | None:
        tensor: Tensor | None = getattr(terms, name)
        if tensor is None or name == "sequences":
            return tensor
        return torch.where(keep, tensor, 0.0)

    return TokenTerms(**{field.name: clean(field.name) for field in fields(terms)})


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the settings ask for a loss that needs {name}, and there are none")
    return tensor


def _policy_losses(terms: TokenTerms, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token [N] and what is to be summed up about it."""
    if settings.policy_loss == "sequence_clip":
        ratio = sequence_ratio(terms.logprobs, terms.old_logprobs, terms.sequences, terms.weights > 0)
    else:
        ratio = (terms.logprobs - terms.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high, advantages = 1.0 - settings.clip_low, 1.0 + settings.clip_high, terms.advantages
    found = {
        "ratio": ratio,
        "clipped_low": ((advantages < 0) & (ratio < low)).float(),
        "clipped_high": ((advantages > 0) & (ratio > high)).float(),
    }
    if settings.policy_loss == "cispo":
        return cispo_losses(terms.logprobs, ratio, advantages, low, high), found
    if settings.policy_loss not in ("clip", "sequence_clip"):
        raise ValueError(f"unknown policy_loss {settings.policy_loss!r}: choose clip, sequence_clip, cispo")
    losses = clipped_losses(ratio, advantages, low, high)
    if settings.dual_clip:
        bound = settings.dual_clip * advantages.abs()
        found["dual_clipped"] = ((advantages < 0) & (losses > bound)).float()
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return losses, found


def clipped_losses(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−min(r_t A_t, clip(r_t, low, high) A_t), [N] (PPO eq. 7; with low = 1 − ε_low, high = 1 + ε_high DAPO eq. 8; with r of a whole
    sequence GSPO eq. 5)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo_losses(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−sg(clip(r_t, low, high)) A_t log π_θ(t), [N] (CISPO, MiniMax-M1 eq. 4 and 5): no token loses its gradient."""
    return -ratio.clamp(low, high).detach() * advantages * logprobs


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor, keep: Tensor) -> Tensor:
    """s_{i,t} = sg(s_i) · π_θ(t) / sg(π_θ(t)) with s_i = exp(mean_t (log π_θ − log π_old)), [N] (GSPO eq. 7, in the form of
    GSPO-token, eq. 14: where a sequence has one advantage, value and gradient are those of GSPO). The mean is over the tokens
    in ``keep``."""
    log_ratios = torch.where(keep, logprobs - old_logprobs, 0.0).detach()
    lengths = _sequence_sums(keep.to(logprobs.dtype), sequences).clamp(min=1.0)
    mean = _sequence_sums(log_ratios, sequences) / lengths
    return (logprobs - logprobs.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()


def correction_weights(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """What the difference between the engine that sampled and the trainer does to a token's policy loss: factors [N], no gradient,
    from w_t = π_old(t) / π_engine(t).

    - truncate: min(w_t, C) (truncated importance sampling; with π_old as proximal policy decoupled PPO)
    - mask: w_t where it is not above C, else 0 (masked importance sampling)
    - sequence_truncate, sequence_mask: the same with Π_t w_t of the token's sequence

    Masked tokens keep their place in the batch's denominators, as tokens with advantage 0 do.
    """
    if settings.correction == "none":
        return torch.ones_like(terms.logprobs)
    log_ratio = (terms.old_logprobs - _given(terms.engine_logprobs, "engine_logprobs")).detach()
    if settings.correction.startswith("sequence_"):
        log_ratio = _sequence_sums(log_ratio, terms.sequences)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if settings.correction in ("truncate", "sequence_truncate"):
        return ratio.clamp(max=settings.correction_cap)
    if settings.correction in ("mask", "sequence_mask"):
        return torch.where(ratio <= settings.correction_cap, ratio, 0.0)
    raise ValueError(
        f"unknown correction {settings.correction!r}: choose none, truncate, mask, sequence_truncate, sequence_mask"
    )


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) of each token as k3 estimates it: exp(d) − d − 1 with d = log π_ref − log π_θ (GRPO eq. 4), [N]."""
    gap = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap.exp() - gap - 1.0


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((V_θ − R)², (clip(V_θ, V_old − ε, V_old + ε) − R)²), [N] (L^VF of PPO eq. 9; the paper does not clip it, OpenAI's
    baselines do, in ppo2), and 1.0 where the clipped term is the greater one. ``clip`` 0: (V_θ − R)²."""
    plain = (values - returns) ** 2
    if not clip:
        return plain, torch.zeros_like(plain)
    clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)


def _sequence_sums(numbers: Tensor, sequences: Tensor) -> Tensor:
    """Of each token: the sum over its sequence, [N]."""
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    return torch.zeros(count, dtype=numbers.dtype, device=numbers.device).index_add(0, sequences, numbers)[sequences]
