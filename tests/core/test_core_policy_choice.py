"""Which policy a group gets: by its shares, and always the same."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.config import policies as config_policies
from prorl_hpc.core.groups import BatchSampler
from prorl_hpc.core.policy_choice import ANY, PolicyChoice
from prorl_hpc.messages.batch import BatchSpec, GroupFilter

WEIGHTS = st.dictionaries(
    st.sampled_from([f"p{i}" for i in range(6)]), st.floats(0.0, 100.0).filter(lambda w: w == 0 or w > 0.01), min_size=1
).filter(lambda weights: sum(weights.values()) > 0)


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(0, 2**31))
def test_shares_are_those_of_the_weights(weights: dict[str, float], seed: int) -> None:
    choice, n = PolicyChoice(weights, weights, seed), 4000
    drawn = Counter(choice.resolve(ANY, f"b.g{i}") for i in range(n))
    total = sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        # six standard deviations: once in 10^9
        assert abs(drawn[name] - n * share) <= 6 * math.sqrt(n * share * (1 - share)) + 1e-6
    assert set(drawn) <= {name for name, weight in weights.items() if weight > 0}
    assert set(choice.drawn) == {name for name, weight in weights.items() if weight > 0}


@given(WEIGHTS, st.integers(0, 99), st.text(max_size=20), st.randoms())
def test_a_group_always_gets_the_same(weights: dict[str, float], seed: int, key: str, random: object) -> None:
    names = list(weights)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = {name: weights[name] for name in names}
    first = PolicyChoice(weights, weights, seed).resolve(ANY, key)
    assert first == PolicyChoice(names, shuffled, seed).resolve(ANY, key)
    assert PolicyChoice(names, shuffled, seed).resolve("p0", key) == "p0"


def test_without_weights_all_shares_are_equal() -> None:
    choice = PolicyChoice(["policy", "base"])
    assert choice.drawn == ["base", "policy"]
    drawn = Counter(choice.resolve(ANY, str(i)) for i in range(1000))
    assert 400 < drawn["base"] < 600
    assert choice.may_become(ANY) == ["base", "policy"] and choice.may_become("base") == ("base",)


def test_another_seed_draws_others() -> None:
    keys = [f"b.g{i}" for i in range(100)]
    one, other = (PolicyChoice(["a", "b"], seed=seed) for seed in (0, 1))
    assert [one.resolve(ANY, key) for key in keys] != [other.resolve(ANY, key) for key in keys]


@pytest.mark.parametrize(
    ("weights", "words"),
    [({"c": 1.0}, "no policy 'c'"), ({"a": 0.0}, "greater than 0"), ({"a": -1.0, "b": 2.0}, "0 or more")],
)
def test_weights_that_cannot_be(weights: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PolicyChoice(["a", "b"], weights)


def test_config_and_core_say_the_same_word() -> None:
    assert config_policies.ANY == ANY


def batch_for(policy: str, choice: PolicyChoice) -> list[tuple[str, str]]:
    rows = [{"id": str(i)} for i in range(40)]
    order = BatchSpec("b", "t", rows, 40, 3, filter=GroupFilter.ALL, policy=policy)
    return [(spec.group_id, spec.policy) for spec in BatchSampler(order, 0.0, choice=choice).begin(0.0).submit]


def test_all_samples_of_a_group_have_one_policy() -> None:
    drawn = batch_for(ANY, PolicyChoice(["policy", "base"], {"policy": 3, "base": 1}))
    of_group = {group: {policy for g, policy in drawn if g == group} for group, _ in drawn}
    assert all(len(policies) == 1 for policies in of_group.values())
    counts = Counter(policy for _, policy in drawn)
    assert counts["policy"] > counts["base"] > 0


def test_an_order_for_the_trained_policy_never_has_others() -> None:
    drawn = batch_for("policy", PolicyChoice(["policy", "base"], {"base": 1}))
    assert {policy for _, policy in drawn} == {"policy"}
