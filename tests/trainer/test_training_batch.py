from __future__ import annotations

import math

import msgspec
import pytest
from fake_rollouts import batch_result, rollout

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.batch import GroupOutcome, GroupResult
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.rollout import Status
from prorl_hpc.messages.trajectory import Finish, Segment, Trajectory
from prorl_hpc.trainer.batches import check_vocabulary, training_batch
from prorl_hpc.trainer.layout import make_rows


def group(*rollouts, outcome=GroupOutcome.ACCEPTED):
    return GroupResult(rollouts[0].group_id, 0, outcome, list(rollouts))


def batch(*rollouts, **settings):
    return training_batch(batch_result([group(*rollouts)]), TrainerConfig(**settings))


def test_ids_mask_logprobs_and_advantage_arrive_unchanged():
    found = batch(rollout("b.g0.s0", 1.0, logprobs=[-0.1, -0.2, -0.3]), rollout("b.g0.s1", 0.0))
    first, second = found.samples
    assert first.token_ids == [1, 2, 3, 7, 8, 9]
    assert first.loss_mask == [False] * 3 + [True] * 3
    assert first.logprobs == [0.0] * 3 + [-0.1, -0.2, -0.3]
    assert (first.advantage, second.advantage) == pytest.approx((0.7071, -0.7071), abs=1e-4)
    assert found.total_tokens == 6


def test_dropped_groups_are_not_trained_on():
    dropped = group(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0), outcome=GroupOutcome.BROKEN)
    assert training_batch(batch_result([dropped]), TrainerConfig()).samples == []


def test_a_broken_rollout_is_left_out_of_mean_and_std():
    found = batch(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0), rollout("b.g0.s2", None, status=Status.FAILED))
    assert [s.rollout_id for s in found.samples] == ["b.g0.s0", "b.g0.s1"]
    assert found.samples[0].advantage == pytest.approx(0.7071, abs=1e-4)


def test_overlong_filtering_masks_the_tokens_and_keeps_the_reward_in_the_mean():
    rollouts = [rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0, truncated=True), rollout("b.g0.s2", 0.0)]
    found = batch(*rollouts)
    assert [s.rollout_id for s in found.samples] == ["b.g0.s0", "b.g0.s2"]
    assert found.samples[0].advantage == pytest.approx(1.1547, abs=1e-4)
    assert found.total_tokens == 6
    assert len(batch(*rollouts, overlong_filtering=False).samples) == 3


def with_branches(base, *branches, **changes):
    trajectory = msgspec.structs.replace(base.trajectory, branches=list(branches), **changes)
    return msgspec.structs.replace(base, trajectory=trajectory)


def branch(*ids, prompt=(1, 2), **fields):
    return Trajectory([Segment(list(prompt)), Segment(list(ids), [-0.4] * len(ids), True, 0)], **fields)


def test_each_branch_is_a_sample_with_its_rollouts_advantage():
    first = with_branches(rollout("b.g0.s0", 1.0), branch(4, 5), branch(6, prompt=(1, 2, 7)))
    found = batch(first, rollout("b.g0.s1", 0.0))
    assert [(s.rollout_id, s.part, s.token_ids) for s in found.samples] == [
        ("b.g0.s0", 0, [1, 2, 3, 7, 8, 9]),
        ("b.g0.s0", 1, [1, 2, 4, 5]),
        ("b.g0.s0", 2, [1, 2, 7, 6]),
        ("b.g0.s1", 0, [1, 2, 3, 7, 8, 9]),
    ]
    assert len({s.advantage for s in found.samples[:3]}) == 1
    assert found.samples[2].loss_mask == [False, False, False, True]
    assert found.total_tokens == 3 + 2 + 1 + 3, "what a branch generated counts in the mean, what it inherited does not"


def test_a_rollout_of_which_only_a_branch_was_generated():
    alone = msgspec.structs.replace(
        rollout("b.g0.s0", 1.0), trajectory=Trajectory([Segment([1])], branches=[branch(4)])
    )
    assert [s.part for s in batch(alone, rollout("b.g0.s1", 0.0)).samples] == [1, 0]


def test_overlong_filtering_looks_at_each_conversations_end():
    cut = branch(4, finish=Finish.CONTEXT, truncated=True)
    turns = with_branches(rollout("b.g0.s0", 1.0), cut, branch(5), finish=Finish.TURNS)
    rollouts = [turns, rollout("b.g0.s1", 0.0)]
    assert [s.part for s in batch(*rollouts).samples] == [0, 2, 0]
    assert [s.part for s in batch(*rollouts, overlong_finishes=["turns"]).samples] == [1, 2, 0]
    assert len(batch(*rollouts, overlong_filtering=False).samples) == 4


def test_a_branch_that_cannot_be_trained_on_is_named():
    broken = with_branches(rollout("b.g0.s1", 0.0), branch(4), Trajectory([Segment([3], [-1.0], True, 0)]))
    with pytest.raises(RunError, match=r"b\.g0\.s1, branch 2, from server .* begins with a generated token"):
        batch(rollout("b.g0.s0", 1.0), broken)


def test_rows_of_branches_keep_every_trained_token_once():
    first = with_branches(rollout("b.g0.s0", 1.0), branch(4, 5, prompt=(9, 9)), branch(6, prompt=(8,)))
    found = batch(first, with_branches(rollout("b.g0.s1", 0.0), branch(3, prompt=(9, 9))))
    for share in (True, False):
        rows = make_rows(found.samples, 64, share_prompts=share)
        assert sorted(target for row in rows for target in row.targets) == sorted([7, 8, 9] * 2 + [4, 5, 6, 3])


def test_soft_overlong_punishment_changes_the_reward():
    long = rollout("b.g0.s0", 1.0, tokens=[7] * 9)
    found = batch(long, rollout("b.g0.s1", 1.0), soft_overlong_cache_tokens=4, max_response_tokens=10)
    assert found.samples[0].advantage < 0 < found.samples[1].advantage


def test_samples_without_advantage_are_not_computed_but_counted():
    found = batch(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.5), rollout("b.g0.s2", 0.0))
    assert [s.rollout_id for s in found.samples] == ["b.g0.s0", "b.g0.s2"]
    assert found.total_tokens == 9


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_a_reward_that_is_not_a_number_names_the_rollout(reward):
    with pytest.raises(RunError, match=r"b\.g0\.s1.*reward"):
        batch(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", reward))


@pytest.mark.parametrize(
    ("segments", "complaint"),
    [
        ([Segment([1, 2]), Segment([3, 4])], "no token with logprobs"),
        ([Segment([3, 4], [-1.0, -1.0], True, 0)], "begins with a generated token"),
        ([Segment([1]), Segment([3, 4], [-1.0, math.nan], True, 0)], "logprob of nan"),
        ([Segment([1]), Segment([3, 4], [-1.0, 0.7], True, 0)], "logprob of 0.7"),
        ([Segment([1]), Segment([3] * 9, [0.0] * 9, True, 0)], "only zeros"),
    ],
)
def test_what_cannot_be_trained_on_names_the_rollout(segments, complaint):
    broken = msgspec.structs.replace(rollout("b.g0.s1", 0.0), trajectory=Trajectory(segments), server="inference-3")
    with pytest.raises(RunError, match=rf"b\.g0\.s1 from server inference-3.*{complaint}"):
        batch(rollout("b.g0.s0", 1.0), broken)


def test_a_token_id_that_the_model_does_not_have_is_refused_by_name():
    found = batch(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0))
    check_vocabulary(found, 10)
    with pytest.raises(RunError, match=r"b\.g0\.s0 has token id 9, the model that is trained knows 0 to 8"):
        check_vocabulary(found, 9)


def test_rewards_and_versions_come_along():
    found = batch(rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.25))
    assert [s.reward for s in found.samples] == [1.0, 0.25]
    two = [Segment([1]), Segment([3], [-1.0], True, 7), Segment([2]), Segment([4, 5], [-1.0, -2.0], True, 5)]
    mixed = msgspec.structs.replace(rollout("b.g0.s1", 0.0), trajectory=Trajectory(two))
    assert [s.oldest_version for s in batch(rollout("b.g0.s0", 1.0), mixed).samples] == [0, 5]


def versioned(name: str, reward: float, version: int | None):
    segments = [Segment([1, 2]), Segment([3, 4], [-1.0, -1.0], True, version)]
    return msgspec.structs.replace(rollout(name, reward), trajectory=Trajectory(segments))


def pair(number: int, *versions: int | None, row: int | None = None, **fields):
    rollouts = [versioned(f"b.g{number}.s{i}", float(i), version) for i, version in enumerate(versions)]
    return GroupResult(f"b.g{number}", number if row is None else row, GroupOutcome.ACCEPTED, rollouts, **fields)


def test_groups_with_a_token_that_is_too_old_are_left_out_and_counted():
    result = batch_result([pair(0, 4, 3), pair(1, 4, 4), pair(2, 2, 4)])
    found = training_batch(result, TrainerConfig(), oldest_allowed=4)
    assert {s.group_id for s in found.samples} == {"b.g1"}
    assert (found.stale_groups, found.total_tokens) == (2, 4)
    assert [s.weight for s in found.samples] == [0.25, 0.25]
    assert training_batch(result, TrainerConfig(), oldest_allowed=2).stale_groups == 0


def test_tokens_of_an_unknown_age_are_refused_where_it_matters():
    result = batch_result([pair(0, 4, None), pair(1, 3, 4)])
    synchronous = training_batch(result, TrainerConfig(), oldest_allowed=4)
    assert {s.group_id for s in synchronous.samples} == {"b.g0"} and synchronous.stale_groups == 1
    with pytest.raises(RunError, match=r"b\.g0\.s1.*without a weight version.*trainer\.staleness=0"):
        training_batch(result, TrainerConfig(staleness=1), oldest_allowed=3)


def test_groups_come_in_the_order_of_their_rows():
    groups = [pair(5, 0, 0), pair(2, 0, 0), pair(9, 0, 0, carried_from="a"), pair(3, 0, 0)]
    found = training_batch(batch_result(groups), TrainerConfig())
    assert list(dict.fromkeys(s.group_id for s in found.samples)) == ["b.g9", "b.g2", "b.g3", "b.g5"]


@pytest.mark.parametrize(
    ("settings", "advantages"),
    [
        ({"advantage": "group"}, [1.1547, -0.5774, -0.5774]),
        ({"advantage": "group_mean"}, [2 / 3, -1 / 3, -1 / 3]),
        ({"advantage": "leave_one_out"}, [1.0, -0.5, -0.5]),
        # Tokens 3, 3 and 1: mean 2/21, unbiased standard deviation 0.5345
        ({"advantage": "batch"}, [1.0690, -0.8018, -0.8018]),
        ({"advantage": "gae"}, [0.0, 0.0, 0.0]),
    ],
)
def test_each_kind_of_advantage(settings, advantages):
    rollouts = [rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0), rollout("b.g0.s2", 0.0, tokens=[7])]
    assert [s.advantage for s in batch(*rollouts, **settings).samples] == pytest.approx(advantages, abs=1e-4)


def test_an_unknown_kind_of_advantage_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"trainer\.advantage=q: choose group"):
        batch(rollout("b.g0.s0", 1.0), advantage="q")


@pytest.mark.parametrize("settings", [{"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, {"advantage": "gae"}])
def test_samples_without_advantage_are_computed_where_something_else_has_a_gradient(settings):
    rollouts = [rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.5), rollout("b.g0.s2", 0.0)]
    assert len(batch(*rollouts, **settings).samples) == 3
    found = batch(*rollouts)
    assert len(found.samples) == 2
    assert [(x.group_id, x.trained_tokens) for x in found.left_out] == [("b.g0", 3)]


def test_weights_are_shares_of_the_whole_batch():
    rollouts = [rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.5, tokens=[7]), rollout("b.g0.s2", 0.0)]
    assert [s.weight for s in batch(*rollouts).samples] == pytest.approx([1 / 7, 1 / 7])
    by_sequence = batch(*rollouts, aggregation="seq_mean_token_mean", kl_coefficient=0.1)
    assert [s.weight for s in by_sequence.samples] == pytest.approx([1 / 9, 1 / 3, 1 / 9])
    constant = batch(*rollouts, aggregation="seq_mean_token_sum_norm", aggregation_tokens=10)
    assert [s.weight for s in constant.samples] == pytest.approx([1 / 30, 1 / 30])


def test_mini_batches_have_whole_groups_and_weights_of_their_own():
    config = TrainerConfig()
    found = training_batch(batch_result([pair(i, 0, 0) for i in range(5)]), config)
    parts = found.mini_batches(2, config)
    assert [list(dict.fromkeys(s.group_id for s in p.samples)) for p in parts] == [
        ["b.g0", "b.g2", "b.g4"],
        ["b.g1", "b.g3"],
    ]
    assert [p.total_tokens for p in parts] == [12, 8]
    for part in parts:
        assert sum(s.weight * s.trained_tokens for s in part.samples) == pytest.approx(1.0)
    assert found.mini_batches(1, config) == [found]
    assert len(found.mini_batches(9, config)) == 5


def test_mini_batches_count_tokens_that_are_not_computed():
    config = TrainerConfig(dynamic_sampling=False)
    uniform = GroupResult(
        "b.g1", 1, GroupOutcome.ACCEPTED, [versioned("b.g1.s0", 1.0, 0), versioned("b.g1.s1", 1.0, 0)]
    )
    found = training_batch(batch_result([pair(0, 0, 0), uniform, pair(2, 0, 0)]), config)
    whole, nothing_to_do = found.mini_batches(1, config), found.mini_batches(3, config)
    assert whole[0].total_tokens == 12 and [s.weight for s in whole[0].samples] == pytest.approx([1 / 12] * 4)
    assert [{s.group_id for s in p.samples} for p in nothing_to_do] == [{"b.g0"}, {"b.g2"}]
