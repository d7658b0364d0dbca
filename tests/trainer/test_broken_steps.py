from __future__ import annotations

import msgspec
import pytest
from fake_rollouts import batch_result, rollout

from prorl_hpc.messages.batch import BatchResult, GroupOutcome, GroupResult
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Failure, FailureKind, Stage, Status
from prorl_hpc.trainer.broken_steps import BrokenSteps


def step(**counts: int) -> BatchResult:
    failed = rollout("b.g0.s0", None, status=Status.FAILED)
    failed = msgspec.structs.replace(failed, failure=Failure(Stage.RUN, FailureKind.TASK, "the tool is not there"))
    result = batch_result([GroupResult("b.g0", 0, GroupOutcome.BROKEN, [failed])])
    progress = msgspec.structs.replace(result.progress, **{"accepted": 0, "uniform": 0, "broken": 0, **counts})
    return msgspec.structs.replace(result, progress=progress)


def test_three_steps_of_broken_groups_end_the_run_with_a_rollouts_words():
    broken = BrokenSteps()
    broken.count(step(broken=2), 0)
    broken.count(step(broken=2), 0)
    with pytest.raises(RunError, match=r"every group of the last 3 steps broke.*task: the tool is not there"):
        broken.count(step(broken=1), 0)


@pytest.mark.parametrize("between", [{"uniform": 1, "broken": 1}, {"accepted": 1}, {}])
def test_a_step_with_a_group_that_did_not_break_begins_the_count_anew(between):
    broken = BrokenSteps()
    for counts in ({"broken": 2}, {"broken": 2}, between, {"broken": 2}, {"broken": 2}):
        broken.count(step(**counts), 0)


def test_three_steps_of_groups_that_are_too_old_end_the_run_naming_the_setting():
    broken = BrokenSteps()
    for accepted, stale in ((2, 2), (2, 2), (2, 1), (2, 2), (3, 3)):
        broken.count(step(accepted=accepted), stale)
    with pytest.raises(RunError, match=r"last 3 steps.*older than trainer\.staleness allows.*--fresh"):
        broken.count(step(accepted=1, uniform=1), 1)
