from __future__ import annotations

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, Status
from prorl_hpc.observe.wording import commonest_failure


def test_an_evaluation_that_failed_says_what_most_rollouts_said() -> None:
    said = ["RuntimeError: eval boom", "no worker", "RuntimeError: eval boom"]
    rollouts = [
        RolloutResult(f"r{i}", "g", i, "t", Status.FAILED, failure=Failure(Stage.EVAL, FailureKind.TASK, message))
        for i, message in enumerate(said)
    ]
    progress = BatchProgress("b", BatchState.DONE, 1, 0, 0, 1, 0, 0, 3, 1)
    result = BatchResult(progress, [GroupResult("g", 0, GroupOutcome.BROKEN, rollouts)], 1.0)
    assert commonest_failure(result) == ", 2 of them: RuntimeError: eval boom"
    assert commonest_failure(BatchResult(progress, [], 1.0)) == ""
