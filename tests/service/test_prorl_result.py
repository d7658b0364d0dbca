"""How a rollout's end reads in ProRL Agent's words."""

from __future__ import annotations

import pytest

from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, StageTiming, Status
from prorl_hpc.messages.trajectory import Message, Segment, ToolCall, Trajectory
from prorl_hpc.service.prorl_result import prorl_messages, prorl_result


def ended(status: Status, **more: object) -> RolloutResult:
    return RolloutResult("r", "", 0, "t", status, **more)  # type: ignore[arg-type]


def broken(stage: Stage | None, kind: FailureKind, status: Status = Status.FAILED) -> RolloutResult:
    return ended(status, failure=Failure(stage, kind, "it broke"), timings=[StageTiming(Stage.RUN, 0.0, 1.0)])


@pytest.mark.parametrize(
    ("result", "critical", "filtered"),
    [
        (ended(Status.DONE, reward=0.0), None, False),
        (broken(Stage.INIT, FailureKind.SANDBOX), "init", True),
        (broken(Stage.RUN, FailureKind.INFERENCE), "run", True),
        (broken(Stage.EVAL, FailureKind.TASK), "eval", True),
        (broken(None, FailureKind.INFRASTRUCTURE), "run", True),
        (broken(Stage.RUN, FailureKind.POLICY), None, False),
        (broken(Stage.RUN, FailureKind.TASK, Status.TIMED_OUT), "timeout", True),
        (ended(Status.CANCELLED), None, True),
    ],
)
def test_what_must_not_be_trained_on(result: RolloutResult, critical: str | None, filtered: bool) -> None:
    told = prorl_result(result, {})
    assert (told.critical_error, told.filter) == (critical, filtered)
    assert told.success is (result.status is Status.DONE)
    assert told.timing.timeout_triggered is (result.status is Status.TIMED_OUT)


def test_a_fault_is_no_reward() -> None:
    told = prorl_result(broken(Stage.EVAL, FailureKind.INFRASTRUCTURE), {})
    assert (told.reward, told.resolved, told.error) == (None, False, "it broke")
    assert prorl_result(ended(Status.DONE, reward=1.0), {}).resolved


def test_a_truncated_trajectory_did_not_end_properly() -> None:
    told = prorl_result(ended(Status.DONE, reward=0.0, trajectory=Trajectory(truncated=True)), {})
    assert (told.success, told.finish, told.end_properly) == (True, False, False)


def test_each_turn_has_its_tokens_and_all_that_came_before() -> None:
    messages = [Message(role, role) for role in ("system", "user", "assistant", "tool", "assistant")]
    segments = [
        Segment([1, 2]),
        Segment([3], [-0.1], True, 0),
        Segment([4], [-0.2], True, 1),  # the weights changed within the turn
        Segment([5]),
        Segment([6], [-0.3], True, 1),
    ]
    told = prorl_messages(Trajectory(segments, messages))
    assert [(m.token_ids, m.input_ids, m.logprobs) for m in told if m.role == "assistant"] == [
        ([3, 4], [1, 2], [-0.1, -0.2]),
        ([6], [1, 2, 3, 4, 5], [-0.3]),
    ]
    assert all(m.token_ids is m.input_ids is m.logprobs is None for m in told if m.role != "assistant")


def test_calls_are_in_openais_words_and_branches_are_left_out() -> None:
    made = Message("assistant", "so", tool_calls=[ToolCall("bash", {"command": "ls"}, "call_1")])
    branch = Trajectory(
        [Segment([9]), Segment([8], [-1.0], True, 0)], [Message("user", "x"), Message("assistant", "y")]
    )
    told = prorl_messages(
        Trajectory([Segment([1])], [Message("user", "p"), made, Message("user", "q")], branches=[branch])
    )
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert [m.tool_calls for m in told] == [None, [{"id": "call_1", "type": "function", "function": function}], None]


def test_answers_that_nobody_generated_have_no_tokens() -> None:
    messages = [Message(role, "") for role in ("user", "assistant", "user", "assistant")]
    told = prorl_messages(Trajectory([Segment([1]), Segment([2], [-1.0], True, 0)], messages))
    assert [m.token_ids for m in told] == [None, None, None, [2]]


def test_a_turn_that_was_aborted_before_its_first_token() -> None:
    messages = [Message(role, "") for role in ("user", "assistant", "tool", "assistant")]
    told = prorl_messages(Trajectory([Segment([1]), Segment([2], [-1.0], True, 0), Segment([3])], messages))
    assert [m.token_ids for m in told] == [None, [2], None, None]
