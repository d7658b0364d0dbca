from __future__ import annotations

import msgspec
import pytest
from fake_rollouts import batch_result, rollout

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.batch import GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.trajectory import Finish, Segment, Trajectory
from prorl_hpc.trainer.batches import training_batch
from prorl_hpc.trainer.step_metrics import finish_shares, rollout_metrics, speeds, token_ages


def ended(rollout_id: str, finish: Finish, *branches: Trajectory) -> RolloutResult:
    base = rollout(rollout_id, 1.0)
    trajectory = msgspec.structs.replace(base.trajectory, finish=finish, branches=list(branches))
    return msgspec.structs.replace(base, trajectory=trajectory)


def test_why_rollouts_ended_and_what_their_branches_generated() -> None:
    branch = Trajectory([Segment([1, 2]), Segment([3], [-1.0], True, 4)], finish=Finish.CONTEXT)
    rollouts = [
        ended("b.g0.s0", Finish.ANSWER, branch, branch),
        ended("b.g0.s1", Finish.ANSWER),
        ended("b.g0.s2", Finish.UNKNOWN),
        rollout("b.g0.s3", None, status=Status.FAILED),
    ]
    group = GroupResult("b.g0", 0, GroupOutcome.ACCEPTED, rollouts)
    found = rollout_metrics(batch_result([group]))
    assert found["finish"] == pytest.approx({"answer": 2 / 3, "unknown": 1 / 3})
    assert found["branches"] == pytest.approx(2 / 3)
    assert found["tokens_generated"] == 4 * 3 + 2 and found["tokens_total"] == 4 * 6 + 2 * 3
    assert found["response_tokens"] == pytest.approx((3 * 3 + 2) / 3)


def aged(rollout_id: str, version: int, reward: float) -> RolloutResult:
    segments = [Segment([1, 2]), Segment([3, 4, 5], [-1.0] * 3, True, version), Segment([6], [-1.0], True, version + 1)]
    return msgspec.structs.replace(rollout(rollout_id, reward), trajectory=Trajectory(segments))


def test_ages_are_those_of_the_tokens_that_are_trained_on() -> None:
    groups = [
        GroupResult(f"b.g{i}", i, outcome, [aged(f"b.g{i}.s0", version, 0.0), aged(f"b.g{i}.s1", version, 1.0)])
        for i, (outcome, version) in enumerate(
            [
                (GroupOutcome.ACCEPTED, 6),
                (GroupOutcome.ACCEPTED, 5),
                (GroupOutcome.ACCEPTED, 3),
                (GroupOutcome.UNIFORM, 4),
            ]
        )
    ]
    result = batch_result(groups)
    batch = training_batch(result, TrainerConfig(), oldest_allowed=5)
    assert batch.stale_groups == 1
    found = token_ages(result, batch, version=7, oldest=5)
    assert found == {"staleness": pytest.approx((3 * 1 + 0 + 3 * 2 + 1) / 8), "staleness_max": 2}
    assert token_ages(result, training_batch(result, TrainerConfig(), oldest_allowed=9), version=9, oldest=9) == {}


def test_rewards_by_task_and_groups_that_were_replaced() -> None:
    other = msgspec.structs.replace(rollout("b.g1.s0", 0.5), task="other")
    groups = [
        GroupResult("b.g0", 0, GroupOutcome.ACCEPTED, [rollout("b.g0.s0", 1.0), rollout("b.g0.s1", 0.0)]),
        GroupResult("b.g1", 1, GroupOutcome.UNIFORM, [other]),
        GroupResult("b.g2", 2, GroupOutcome.BROKEN, []),
    ]
    result = batch_result(groups)
    progress = msgspec.structs.replace(result.progress, groups_wanted=2)
    found = rollout_metrics(msgspec.structs.replace(result, progress=progress))
    assert found["reward_by_task"] == {"other": 0.5, "toy": 0.5}
    assert found["groups_replaced"] == 1, "the other one was not, the prompts were used up"


def test_speeds_are_per_second_of_their_own_work() -> None:
    record = {"rollouts": 8, "tokens_generated": 100, "tokens_computed": 300, "tokens_trained": 90}
    result = msgspec.structs.replace(batch_result([]), elapsed_s=4.0)
    assert speeds(record, result, {"rollouts": 0.1, "training": 2.0}) == {
        "rollouts_per_s": 2.0,
        "tokens_per_s": 25.0,
        "training_tokens_per_s": 150.0,
        "trained_tokens_per_s": 45.0,
    }
    assert "trained_tokens_per_s" not in speeds(record, result, {"rollouts": 0.1})


def test_accepted_groups_without_a_difference_are_counted() -> None:
    """Where nothing is filtered (dynamic_sampling=false) they are in the batch."""
    rewards = [(0.0, 0.0), (0.3, 0.1 + 0.2), (0.0, 1.0), (1.0, None)]
    groups = [
        GroupResult(
            f"b.g{i}",
            i,
            GroupOutcome.ACCEPTED,
            [
                rollout(f"b.g{i}.s{k}", r, status=Status.DONE if r is not None else Status.FAILED)
                for k, r in enumerate(of)
            ],
        )
        for i, of in enumerate(rewards)
    ]
    groups.append(GroupResult("b.g9", 9, GroupOutcome.UNIFORM, [rollout("b.g9.s0", 1.0), rollout("b.g9.s1", 1.0)]))
    found = rollout_metrics(batch_result(groups))
    assert (found["groups_equal_rewards"], found["groups_uniform"]) == (3, 1)


def test_spread_of_rewards_and_longest_response() -> None:
    long = rollout("b.g0.s1", 1.0, tokens=list(range(10, 21)))
    group = GroupResult("b.g0", 0, GroupOutcome.ACCEPTED, [rollout("b.g0.s0", 0.0), long])
    found = rollout_metrics(batch_result([group]))
    assert found["reward_std"] == pytest.approx(0.5**0.5) and found["response_tokens_max"] == 11
    assert not {"reward_std", "response_tokens_max"} & rollout_metrics(batch_result([])).keys()


def test_no_rollouts_no_shares() -> None:
    assert finish_shares([]) is None
