from __future__ import annotations

import math

import pytest
import torch

from prorl_hpc.trainer.losses import LossSums, dapo_loss, group_advantages, soft_overlong_punishment


def loss_of(ratio: list[float], advantages: list[float], mask: list[float] | None = None, total: float | None = None):
    old = torch.full((len(ratio),), -2.0)
    logprobs = (old + torch.tensor(ratio).log()).requires_grad_()
    mask_tensor = torch.ones(len(ratio)) if mask is None else torch.tensor(mask)
    loss, sums = dapo_loss(
        logprobs,
        old,
        torch.tensor(advantages),
        mask_tensor,
        total_tokens=total or len(ratio),
        clip_low=0.2,
        clip_high=0.28,
    )
    loss.backward()
    return loss.item(), logprobs.grad, sums


def test_advantages_of_a_known_group():
    assert group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == pytest.approx(
        [0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4
    )


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], []])
def test_groups_without_a_difference_have_no_advantage(rewards):
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize(("length", "expected"), [(79, 0), (80, 0), (90, -0.5), (100, -1), (101, -1), (500, -1)])
def test_soft_overlong_punishment_has_its_floor(length, expected):
    assert soft_overlong_punishment(length, 100, 20) == pytest.approx(expected)


def test_soft_overlong_punishment_can_be_off_and_refuses_nonsense():
    assert soft_overlong_punishment(1000, 0, 0) == 0
    with pytest.raises(ValueError, match="between 1"):
        soft_overlong_punishment(5, 10, 20)


def test_the_loss_clips_higher_up_than_down():
    # min(r A, clip(r, 0.8, 1.28) A) by hand: 1.0, 1.28, -0.8 (from 0.5), -1.5, 0.5
    loss, grad, sums = loss_of([1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0, 1.0])
    assert loss == pytest.approx(-(1.0 + 1.28 - 0.8 - 1.5 + 0.5) / 5, rel=1e-5)
    # The gradient of an unclipped token is -r A / n; a clipped one has none.
    assert grad.tolist() == pytest.approx([-0.2, 0.0, 0.0, 0.3, -0.1], rel=1e-5)
    assert (sums.clipped_low, sums.clipped_high, sums.tokens) == (1, 1, 5)
    assert sums.means()["ratio"] == pytest.approx(1.0)


def test_parts_of_a_batch_add_up_to_the_whole():
    ratio, advantages = [0.9, 1.1, 1.4, 0.6], [1.0, -0.5, 2.0, -1.0]
    whole, grad, sums = loss_of(ratio, advantages)
    first, first_grad, first_sums = loss_of(ratio[:1], advantages[:1], total=4)
    rest, rest_grad, rest_sums = loss_of(ratio[1:], advantages[1:], total=4)
    assert first + rest == pytest.approx(whole, rel=1e-6)
    assert torch.cat([first_grad, rest_grad]).tolist() == pytest.approx(grad.tolist(), rel=1e-6)
    both = LossSums()
    both += first_sums
    both += rest_sums
    assert both.means() == pytest.approx(sums.means())


def test_masked_tokens_count_nowhere_whatever_they_hold():
    loss, grad, sums = loss_of([1.0, 1.3], [1.0, math.nan], mask=[1.0, 0.0], total=1)
    assert loss == pytest.approx(-1.0)
    assert grad.tolist() == pytest.approx([-1.0, 0.0])
    assert sums.tokens == 1
    loss, grad, _ = loss_of([1.0, 1.3], [1.0, 1.0], mask=[0.0, 0.0], total=1)
    assert (loss, grad.tolist()) == (0.0, [0.0, 0.0])


def test_a_huge_ratio_stays_finite():
    old = torch.tensor([-200.0])
    logprobs = torch.zeros(1, requires_grad=True)
    loss, sums = dapo_loss(
        logprobs, old, torch.tensor([-1.0]), torch.ones(1), total_tokens=1, clip_low=0.2, clip_high=0.28
    )
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(logprobs.grad).all()
    assert sums.logprob_gap_max == 200.0


def test_statistics_of_entropy_and_gap():
    _, sums = dapo_loss(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.1, -2.3]),
        torch.tensor([1.0, 1.0]),
        torch.ones(2),
        total_tokens=2,
        clip_low=0.2,
        clip_high=0.28,
        entropy=torch.tensor([0.5, 1.5]),
    )
    means = sums.means()
    assert means["entropy"] == pytest.approx(1.0)
    assert means["logprob_gap_mean"] == pytest.approx(0.2)
    assert means["logprob_gap_max"] == pytest.approx(0.3, rel=1e-5)
