"""What the pieces of the loss do, by hand; agreement with other libraries is tested with the bench's fixtures."""

from __future__ import annotations

import math

import pytest
import torch

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer.loss_sums import LossSums
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, sequence_weights, training_loss


def terms_of(ratio: list[float], advantages: list[float], weights: list[float] | None = None, **more) -> TokenTerms:
    old = torch.full((len(ratio),), -2.0)
    n = len(ratio)
    return TokenTerms(
        logprobs=(old + torch.tensor(ratio).log()).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(advantages),
        weights=torch.tensor([1.0 / max(n, 1)] * n if weights is None else weights),
        sequences=more.pop("sequences", torch.zeros(n, dtype=torch.int64)),
        **more,
    )


def loss_of(terms: TokenTerms, **settings):
    loss, sums = training_loss(terms, LossSettings(**settings))
    loss.backward()
    return loss.item(), terms.logprobs.grad, sums


def test_the_loss_clips_higher_up_than_down():
    # min(r A, clip(r, 0.8, 1.28) A) by hand: 1.0, 1.28, -0.8 (from 0.5), -1.5, 0.5
    loss, grad, sums = loss_of(terms_of([1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0, 1.0]))
    assert loss == pytest.approx(-(1.0 + 1.28 - 0.8 - 1.5 + 0.5) / 5, rel=1e-5)
    # The gradient of an unclipped token is -r A / n; a clipped one has none.
    assert grad.tolist() == pytest.approx([-0.2, 0.0, 0.0, 0.3, -0.1], rel=1e-5)
    assert (sums.clipped_low, sums.clipped_high, sums.tokens) == (1, 1, 5)
    assert sums.means()["ratio"] == pytest.approx(1.0)


def test_masked_tokens_count_nowhere_whatever_they_hold():
    loss, grad, sums = loss_of(terms_of([1.0, 1.3], [1.0, math.nan], weights=[1.0, 0.0]))
    assert loss == pytest.approx(-1.0)
    assert grad.tolist() == pytest.approx([-1.0, 0.0])
    assert sums.tokens == 1
    loss, grad, sums = loss_of(terms_of([1.0, 1.3], [1.0, 1.0], weights=[0.0, 0.0]))
    assert (loss, grad.tolist(), sums.tokens) == (0.0, [0.0, 0.0], 0)


@pytest.mark.parametrize("policy_loss", ["clip", "sequence_clip", "cispo"])
def test_a_part_without_tokens_gives_zero(policy_loss):
    loss, grad, sums = loss_of(terms_of([], []), policy_loss=policy_loss)
    assert (loss, grad.tolist(), sums) == (0.0, [], LossSums())


@pytest.mark.parametrize("policy_loss", ["clip", "sequence_clip", "cispo"])
@pytest.mark.parametrize("correction", ["truncate", "mask", "sequence_truncate", "sequence_mask"])
def test_huge_ratios_stay_finite(policy_loss, correction):
    logprobs = torch.tensor([0.0, -300.0], requires_grad=True)
    terms = TokenTerms(
        logprobs,
        torch.tensor([-300.0, 0.0]),
        torch.tensor([-1.0, -1.0]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([0, 1]),
        engine_logprobs=torch.tensor([0.0, -500.0]),
        reference_logprobs=torch.tensor([-300.0, 0.0]),
    )
    settings = {"policy_loss": policy_loss, "correction": correction, "kl_coefficient": 0.1}
    loss, grad, sums = loss_of(terms, **settings)
    assert math.isfinite(loss) and torch.isfinite(grad).all()
    assert sums.logprob_gap_max == 500.0
    assert all(math.isfinite(x) for x in sums.means().values())


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone():
    loss, grad, sums = loss_of(terms_of([9.0, 2.0, 9.0], [-1.0, -1.0, 1.0], weights=[1.0] * 3), dual_clip=3.0)
    assert loss == pytest.approx(3.0 + 2.0 - 1.28, rel=1e-5)
    assert grad.tolist() == pytest.approx([0.0, 2.0, 0.0], rel=1e-5)
    assert sums.dual_clipped == 1


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    _, grad, sums = loss_of(terms_of([2.0, 0.1], [1.0, -1.0], weights=[1.0, 1.0]), policy_loss="cispo")
    assert grad.tolist() == pytest.approx([-1.28, 0.8])
    assert (sums.clipped_high, sums.clipped_low) == (1, 1)


def test_gspo_has_one_ratio_for_each_sequence():
    sequences = torch.tensor([0, 1, 0, 1])
    terms = terms_of([1.21, 1.0, 1.0, 4.0], [1.0] * 4, sequences=sequences)
    loss, grad, sums = loss_of(terms, policy_loss="sequence_clip", clip_low=0.3, clip_high=0.3)
    assert loss == pytest.approx(-(1.1 + 1.3) / 2, rel=1e-5)  # √1.21; √4 is clipped
    assert grad.tolist() == pytest.approx([-0.275, 0.0, -0.275, 0.0], rel=1e-5)
    assert sums.clipped_high == 2


def corrected(correction: str, cap: float = 2.0):
    engine = -2.0 - torch.tensor([1.5, 3.0, 1.5, 0.5]).log()  # π_old / π_engine
    terms = terms_of(
        [1.0] * 4, [1.0] * 4, weights=[1.0] * 4, sequences=torch.tensor([0, 0, 1, 1]), engine_logprobs=engine
    )
    _, grad, sums = loss_of(terms, correction=correction, correction_cap=cap)
    return (-grad).tolist(), sums.means()


@pytest.mark.parametrize(
    ("correction", "expected", "masked"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0], None),
        ("truncate", [1.5, 2.0, 1.5, 0.5], None),
        ("mask", [1.5, 0.0, 1.5, 0.5], 0.25),
        ("sequence_truncate", [2.0, 2.0, 0.75, 0.75], None),
        ("sequence_mask", [0.0, 0.0, 0.75, 0.75], 0.5),
    ],
)
def test_corrections_for_the_engine(correction, expected, masked):
    factors, means = corrected(correction)
    assert factors == pytest.approx(expected, rel=1e-5)
    assert means.get("masked_fraction") == masked
    assert ("correction_mean" in means) == ("correction_max" in means) == (correction != "none")
    if correction != "none":
        assert means["correction_mean"] == pytest.approx(sum(expected) / 4, rel=1e-5)
        assert means["correction_max"] == pytest.approx(max(expected), rel=1e-5)


def test_decoupled_ppo_has_three_policies():
    """−(π_prox / π_behaviour) · min(r A, clip(r) A), r = π_θ / π_prox."""
    behaviour = -2.0 - torch.tensor([1.2, 0.4]).log()
    terms = terms_of([1.1, 1.6], [1.0, 1.0], weights=[1.0, 1.0], engine_logprobs=behaviour)
    loss, _, _ = loss_of(terms, correction="truncate", correction_cap=100.0)
    assert loss == pytest.approx(-(1.2 * 1.1 + 0.4 * 1.28), rel=1e-5)


def test_kl_entropy_and_value_add_to_the_loss():
    more = {
        "reference_logprobs": torch.tensor([-2.0 - math.log(2.0)]),
        "entropy": torch.tensor([3.0], requires_grad=True),
        "values": torch.tensor([1.0], requires_grad=True),
        "old_values": torch.tensor([0.0]),
        "returns": torch.tensor([0.5]),
    }
    terms = terms_of([1.0], [0.0], weights=[1.0], **more)
    loss, grad, sums = loss_of(
        terms, kl_coefficient=0.1, entropy_coefficient=0.01, value_coefficient=0.5, value_clip=0.9
    )
    kl = 0.5 + math.log(2.0) - 1.0
    assert loss == pytest.approx(0.1 * kl - 0.03 + 0.5 * 0.25, rel=1e-5)
    assert grad.tolist() == pytest.approx([0.1 * (1.0 - 0.5)], rel=1e-5)
    assert terms.entropy.grad.tolist() == pytest.approx([-0.01])
    assert terms.values.grad.tolist() == pytest.approx([0.5 * 2 * 0.5])
    means = sums.means()
    assert (means["kl"], means["entropy"], means["value_loss"]) == pytest.approx((kl, 3.0, 0.25), rel=1e-5)


def test_a_value_that_moved_too_far_from_its_old_one_has_no_gradient():
    more = {"old_values": torch.tensor([0.0, 0.0]), "returns": torch.tensor([2.0, 0.1])}
    terms = terms_of([1.0, 1.0], [0.0, 0.0], values=torch.tensor([1.0, 1.0], requires_grad=True), **more)
    _, _, sums = loss_of(terms, value_clip=0.2)
    # The first lies between old value and return: the clipped loss is the greater. The second went beyond its return.
    assert terms.values.grad.tolist() == pytest.approx([0.0, 0.5 * 0.5 * 2 * 0.9])
    assert sums.value_clipped == 1


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"correction": "truncate"}, "engine_logprobs"),
        ({"kl_coefficient": 0.1}, "reference_logprobs"),
        ({"entropy_coefficient": 0.1}, "entropy"),
    ],
)
def test_a_term_that_is_missing_is_named(settings, missing):
    with pytest.raises(ValueError, match=f"needs {missing}"):
        loss_of(terms_of([1.0], [1.0]), **settings)


@pytest.mark.parametrize("settings", [{"policy_loss": "ppo"}, {"correction": "some"}])
def test_unknown_names_are_refused(settings):
    with pytest.raises(ValueError, match="choose"):
        loss_of(terms_of([1.0], [1.0], engine_logprobs=torch.zeros(1)), **settings)


def test_what_was_not_measured_is_left_out_and_0_is_not():
    _, _, sums = loss_of(terms_of([1.0, 1.0], [1.0, -1.0]))
    ours = {"loss", "ratio", "ppo_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high"}
    assert sums.means().keys() == ours | {"logprob_gap_mean", "logprob_gap_max"}
    assert (sums.means()["clip_fraction"], sums.means()["ppo_kl"]) == (0.0, 0.0)
    assert sums.without_gap().means().keys() == ours
    assert loss_of(terms_of([1.0], [1.0]), dual_clip=3.0)[2].means()["dual_clip_fraction"] == 0.0


def test_the_kl_to_the_old_policy_is_the_mean_of_the_log_ratios():
    _, _, sums = loss_of(terms_of([math.e, math.exp(-0.5)], [1.0, 1.0]))
    assert sums.means()["ppo_kl"] == pytest.approx((-1.0 + 0.5) / 2, rel=1e-5)


def test_a_gap_counts_only_the_tokens_of_which_it_was_measured():
    first = loss_of(terms_of([1.2, 1.2], [1.0, 1.0]))[2]
    later = loss_of(terms_of([3.0] * 3, [1.0] * 3))[2].without_gap()
    later += first
    assert later.tokens == 5
    assert later.means()["logprob_gap_mean"] == pytest.approx(math.log(1.2), rel=1e-5)
    assert later.means()["logprob_gap_max"] == pytest.approx(math.log(1.2), rel=1e-5)


def test_the_gap_is_always_measured_against_the_engine():
    terms = terms_of([1.0, 1.0], [1.0, 1.0])
    _, _, sums = loss_of(terms)
    assert sums.means()["logprob_gap_mean"] == 0.0
    engine = torch.tensor([-2.1, -2.3])
    # π_θ has moved on; engine and trainer differ by what they differed before the first update.
    _, _, sums = loss_of(terms_of([1.5, 1.5], [1.0, 1.0], engine_logprobs=engine))
    assert sums.means()["logprob_gap_mean"] == pytest.approx(0.2, rel=1e-5)
    assert sums.means()["logprob_gap_max"] == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 5, 0.0, 1 / 5]),
        ("seq_mean_token_sum", [1 / 2, 0.0, 1 / 2]),
        ("seq_mean_token_mean", [1 / 8, 0.0, 1 / 2]),
        ("seq_mean_token_sum_norm", [1 / 200, 0.0, 1 / 200]),
    ],
)
def test_weights_of_each_aggregation(aggregation, expected):
    assert sequence_weights([4, 0, 1], aggregation, 100) == pytest.approx(expected)
    assert sequence_weights([0, 0], aggregation, 100) == [0.0, 0.0]
    assert sequence_weights([], aggregation, 100) == []


def test_weights_refuse_nonsense():
    with pytest.raises(ValueError, match="1 or more, got 0"):
        sequence_weights([1], "seq_mean_token_sum_norm", 0)
    with pytest.raises(ValueError, match="token_mean"):
        sequence_weights([1], "mean", 0)


def test_settings_come_from_the_configuration():
    config = TrainerConfig(policy_loss="cispo", clip_high=4.0, kl_coefficient=0.3, value_clip=0.7, correction="mask")
    settings = LossSettings.of(config)
    assert (settings.policy_loss, settings.clip_high, settings.kl_coefficient) == ("cispo", 4.0, 0.3)
    assert (settings.value_clip, settings.correction) == (0.7, "mask")
