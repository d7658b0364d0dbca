"""What holds of every loss: it is the sum of its parts, has no order, and does not see what is masked."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.trainer.loss_sums import LossSums
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, sequence_weights, training_loss

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
LEAVES = ("logprobs", "entropy", "values")

loss_settings = st.builds(
    LossSettings,
    policy_loss=st.sampled_from(["clip", "sequence_clip", "cispo"]),
    dual_clip=st.sampled_from([0.0, 2.0]),
    correction=st.sampled_from(["none", "truncate", "mask", "sequence_truncate", "sequence_mask"]),
    correction_cap=st.sampled_from([1.1, 2.0]),
    kl_coefficient=st.sampled_from([0.0, 0.1]),
    entropy_coefficient=st.sampled_from([0.0, 0.01]),
    value_clip=st.sampled_from([0.0, 0.2]),
)
lengths = st.lists(st.integers(0, 7), min_size=1, max_size=8)


def make_terms(lengths: list[int], aggregation: str, seed: int, spread: float = 0.5) -> TokenTerms:
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(width: float = 1.0) -> torch.Tensor:
        return torch.randn(n, generator=draw, dtype=torch.float64) * width

    logprobs = -normal().abs() - 1.0
    weights = sequence_weights(lengths, aggregation, 16)
    return TokenTerms(
        logprobs=logprobs,
        old_logprobs=logprobs + normal(spread),
        advantages=normal(),
        weights=torch.tensor([w for w, length in zip(weights, lengths, strict=True) for _ in range(length)]).double(),
        sequences=torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64),
        engine_logprobs=logprobs + normal(spread),
        reference_logprobs=logprobs + normal(spread),
        entropy=normal().abs(),
        values=normal(),
        old_values=normal(),
        returns=normal(),
    )


def pick(terms: TokenTerms, places: torch.Tensor) -> TokenTerms:
    """These tokens, their sequences numbered anew."""
    picked = {f.name: getattr(terms, f.name)[places] for f in fields(terms)}
    picked["sequences"] = torch.unique(picked["sequences"], return_inverse=True)[1]
    return TokenTerms(**picked)


def gradients(terms: TokenTerms, how: LossSettings) -> tuple[float, dict[str, torch.Tensor], LossSums]:
    values = {f.name: getattr(terms, f.name) for f in fields(terms)}
    for name in LEAVES:
        values[name] = values[name].clone().requires_grad_()
    loss, sums = training_loss(TokenTerms(**values), how)
    loss.backward()
    found = {name: values[name].grad for name in LEAVES}
    return loss.item(), {n: torch.zeros(len(terms.weights)) if g is None else g for n, g in found.items()}, sums


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-9, atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(lengths, st.sampled_from(AGGREGATIONS), loss_settings, st.integers(0, 999), st.integers(1, 4), st.floats(0, 40))
def test_parts_add_up_to_the_whole(lengths, aggregation, how, seed, parts, spread):
    terms = make_terms(lengths, aggregation, seed, spread)
    loss, grads, sums = gradients(terms, how)
    owner = torch.randint(parts, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    part_of_token = owner[terms.sequences]
    total, total_sums = 0.0, LossSums()
    for part in range(parts):
        places = (part_of_token == part).nonzero()[:, 0]
        part_loss, part_grads, part_sums = gradients(pick(terms, places), how)
        total += part_loss
        total_sums += part_sums
        for name in LEAVES:
            close(part_grads[name], grads[name][places])
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-9)
    assert total_sums.means() == pytest.approx(sums.means(), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(lengths, loss_settings, st.integers(0, 999))
def test_the_order_of_tokens_does_not_matter(lengths, how, seed):
    terms = make_terms(lengths, "seq_mean_token_mean", seed)
    loss, grads, _ = gradients(terms, how)
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(seed))
    shuffled, shuffled_grads, _ = gradients(pick(terms, order), how)
    assert shuffled == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for name in LEAVES:
        close(shuffled_grads[name], grads[name][order])


@settings(max_examples=60, deadline=None)
@given(lengths, loss_settings, st.integers(0, 999))
def test_masked_tokens_may_hold_anything(lengths, how, seed):
    """Tokens of weight 0 between the others, full of NaN, change nothing and get no gradient."""
    terms = make_terms(lengths, "token_mean", seed)
    loss, grads, sums = gradients(terms, how)
    n = sum(lengths)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
    padded = {}
    for f in fields(terms):
        own = getattr(terms, f.name)
        filler = own if f.name == "sequences" else torch.zeros(n).double() if f.name == "weights" else own * math.nan
        padded[f.name] = torch.cat([own, filler])[order]
    found, found_grads, found_sums = gradients(TokenTerms(**padded), how)
    assert found == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert found_sums.means() == pytest.approx(sums.means(), rel=1e-9, abs=1e-9)
    for name in LEAVES:
        back = torch.empty(2 * n).double()
        back[order] = found_grads[name].double()
        close(back[:n], grads[name])
        assert not back[n:].any()


@given(lengths)
def test_weights_sum_to_what_their_names_say(lengths):
    def total(aggregation: str) -> float:
        weights = sequence_weights(lengths, aggregation, 50)
        return sum(w * n for w, n in zip(weights, lengths, strict=True))

    tokens, sequences = sum(lengths), sum(n > 0 for n in lengths)
    some = float(tokens > 0)
    assert total("token_mean") == pytest.approx(some)
    assert total("seq_mean_token_mean") == pytest.approx(some)
    assert total("seq_mean_token_sum") == pytest.approx(tokens / max(sequences, 1))
    assert total("seq_mean_token_sum_norm") == pytest.approx(tokens / max(sequences, 1) / 50)
