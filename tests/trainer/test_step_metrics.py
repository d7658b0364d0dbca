from __future__ import annotations

import msgspec
import pytest
from fake_rollouts import batch_result, rollout

from prorl_hpc.messages.batch import GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.trajectory import Finish, Segment, Trajectory
from prorl_hpc.trainer.step_metrics import finish_shares, rollout_metrics


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


def test_no_rollouts_no_shares() -> None:
    assert finish_shares([]) is None
