from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.trainer.advantages import (
    GROUP_ADVANTAGES,
    Moments,
    batch_advantages,
    gae,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    soft_overlong_punishment,
    whiten,
)

rewards = st.lists(st.integers(-400, 400), min_size=2, max_size=12).map(lambda x: torch.tensor(x).double() / 4)


def test_advantages_of_a_known_group():
    group = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert group_advantages(group).tolist() == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)
    assert group_mean_advantages(group).tolist() == [0.5, -0.5, 0.5, -0.5]
    assert leave_one_out_advantages(group).tolist() == pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3])


@pytest.mark.parametrize("advantages", GROUP_ADVANTAGES.values())
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [], [0.1 + 0.2, 0.3, 0.3]])
def test_groups_without_a_difference_have_no_advantage(advantages, rewards):
    """A rounding error is none."""
    assert advantages(torch.tensor(rewards, dtype=torch.float64)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("advantages", [*GROUP_ADVANTAGES.values(), lambda x: batch_advantages([x], [[1, 1]])])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_a_number_is_refused(advantages, bad):
    with pytest.raises(ValueError, match="finite"):
        advantages(torch.tensor([1.0, bad]))


@settings(deadline=None)
@given(rewards, st.sampled_from(list(GROUP_ADVANTAGES)), st.randoms())
def test_group_advantages_sum_to_zero_and_have_no_order(rewards, name, random):
    found = GROUP_ADVANTAGES[name](rewards)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-6)
    order = list(range(len(rewards)))
    random.shuffle(order)
    torch.testing.assert_close(GROUP_ADVANTAGES[name](rewards[order]), found[order], rtol=1e-6, atol=1e-9)


@given(rewards)
def test_leave_one_out_by_its_definition(rewards):
    n = len(rewards)
    expected = [rewards[i] - (rewards.sum() - rewards[i]) / (n - 1) for i in range(n)]
    assert leave_one_out_advantages(rewards).tolist() == pytest.approx([float(x) for x in expected], abs=1e-9)


def test_batch_advantages_have_mean_0_and_variance_1_over_tokens():
    groups, lengths = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([5.0, 7.0])], [[3, 1, 0], [10, 2]]
    found = batch_advantages(groups, lengths)
    tokens = [
        a
        for group, ns in zip(found, lengths, strict=True)
        for a, n in zip(group.tolist(), ns, strict=True)
        for _ in range(n)
    ]
    assert torch.tensor(tokens).mean().item() == pytest.approx(0.0, abs=1e-6)
    assert torch.tensor(tokens).var().item() == pytest.approx(1.0, rel=1e-5)
    assert batch_advantages([], []) == []
    assert batch_advantages([torch.ones(2)], [[0, 0]])[0].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="one length per reward"):
        batch_advantages(groups, [[1, 1, 1]])


def test_moments_of_parts_add_up():
    values = torch.linspace(-3, 7, 11).double()
    both = Moments.of(values[:4]) + Moments.of(values[4:])
    assert both.mean == pytest.approx(values.mean().item())
    assert both.variance == pytest.approx(values.var().item())
    torch.testing.assert_close(torch.cat([whiten(values[:4], both), whiten(values[4:], both)]), whiten(values))
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


def plain_gae(rewards, values, gamma, lam):
    """GAE eq. 16 as it stands: a sum of discounted δ."""
    after = [*values[1:], *([0.0] if values else [])]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=6), min_size=1, max_size=4),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_gae_is_the_sum_of_discounted_errors_of_each_sequence(sequences, gamma, lam):
    """Also where the tokens of sequences lie between one another's."""
    tokens = sorted((t, s, *pair) for s, sequence in enumerate(sequences) for t, pair in enumerate(sequence))
    numbers = [torch.tensor([token[i] for token in tokens], dtype=torch.float64) for i in (2, 3)]
    owners = torch.tensor([token[1] for token in tokens], dtype=torch.int64)
    advantages, returns = gae(*numbers, owners, gamma, lam)
    torch.testing.assert_close(returns, advantages + numbers[1])
    for s, sequence in enumerate(sequences):
        expected = plain_gae([r for r, _ in sequence], [v for _, v in sequence], gamma, lam)
        assert advantages[owners == s].tolist() == pytest.approx(expected, abs=1e-9)


def test_gae_with_lambda_1_is_the_reward_to_go_less_the_value():
    rewards, values = torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 3.0], requires_grad=True)
    advantages, returns = gae(rewards, values, torch.zeros(3, dtype=torch.int64))
    assert advantages.tolist() == [1.5, 1.0, -1.0]
    assert returns.tolist() == [2.0, 2.0, 2.0] and not returns.requires_grad
    with pytest.raises(ValueError, match="values must be finite"):
        gae(rewards, values * math.nan, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(("length", "expected"), [(79, 0), (80, 0), (90, -0.5), (100, -1), (101, -1), (500, -1)])
def test_soft_overlong_punishment_has_its_floor(length, expected):
    assert soft_overlong_punishment(length, 100, 20) == pytest.approx(expected)


def test_soft_overlong_punishment_can_be_off_and_refuses_nonsense():
    assert soft_overlong_punishment(1000, 0, 0) == 0
    with pytest.raises(ValueError, match="between 1"):
        soft_overlong_punishment(5, 10, 20)
