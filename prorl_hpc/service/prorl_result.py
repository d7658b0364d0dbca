"""A rollout's end in the words of ProRL Agent (arXiv 2603.18815). What this service does not have is null."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import msgspec

from prorl_hpc.messages.rollout import FailureKind, RolloutResult, Stage, Status
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory


class ProrlMessage(msgspec.Struct, frozen=True):
    """``input_ids`` is all that the model read before it wrote ``token_ids``. The three lists are null but in
    messages that the policy generated."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    logprobs: list[float] | None = None


class ProrlTiming(msgspec.Struct, frozen=True):
    """Seconds. ``others_time`` was spent in queues, which ``counted_elapsed`` leaves out."""

    init_time: float
    run_time: float
    eval_time: float
    others_time: float
    counted_elapsed: float
    timeout_triggered: bool


class ProrlResult(msgspec.Struct, frozen=True):
    """``filter``: the trajectory must not be trained on. ``resolved``: the reward is 1 or more; ``reward`` is ours."""

    instance_id: Any
    trajectory_id: Any
    git_patch: str | None
    success: bool
    error: str | None
    finish: bool
    messages: list[ProrlMessage]
    tools: list[dict[str, Any]] | None
    end_properly: bool
    resolved: bool
    critical_error: str | None
    filter: bool
    timing: ProrlTiming
    reward: float | None


def prorl_result(result: RolloutResult, instance: dict[str, Any]) -> ProrlResult:
    success = result.status is Status.DONE
    whole = success and not result.trajectory.truncated
    critical = _critical_error(result)
    of_policy = result.failure is not None and result.failure.kind is FailureKind.POLICY
    return ProrlResult(
        instance_id=instance.get("instance_id"),
        trajectory_id=instance.get("trajectory_id"),
        git_patch=None,
        success=success,
        error=_error(result),
        finish=whole,
        messages=prorl_messages(result.trajectory),
        tools=None,
        end_properly=whole,
        resolved=result.reward is not None and result.reward >= 1.0,
        critical_error=critical,
        # What the model did wrong is a lesson; what broke around it is none.
        filter=critical is not None or not (success or of_policy),
        timing=_timing(result),
        reward=result.reward,
    )


def prorl_messages(trajectory: Trajectory) -> list[ProrlMessage]:
    """Of the main conversation: ProRL Agent has no branches. Each answer of the policy is one run of trained segments (several when the weights changed in its midst)."""
    turns = _turns(trajectory.segments)
    messages = trajectory.messages
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if answers and trajectory.segments and not trajectory.segments[-1].trained and answers[-1] == len(messages) - 1:
        answers.pop()  # a turn that was aborted before its first token
    # From the end: a prompt may bring answers along that nobody generated.
    of_message = dict(zip(reversed(answers), reversed(turns), strict=False))
    return [
        ProrlMessage(message.role, message.content, _tool_calls(message), *of_message.get(i, ()))
        for i, message in enumerate(messages)
    ]


def _tool_calls(message: Message) -> list[dict[str, Any]] | None:
    """As OpenAI has them."""
    calls = []
    for call in message.tool_calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        calls.append({"id": call.call_id, "type": "function", "function": function})
    return calls or None


def _turns(segments: list[Segment]) -> list[tuple[list[int], list[int], list[float]]]:
    """(token ids, ids before them, logprobs) of each."""
    turns, before = [], list[int]()
    for trained, run in groupby(segments, key=lambda segment: segment.trained):
        part = Trajectory(list(run))
        ids = part.token_ids
        if trained:
            turns.append((ids, list(before), part.logprobs))
        before += ids
    return turns


def _error(result: RolloutResult) -> str | None:
    if result.failure is not None:
        return result.failure.message
    return None if result.status is Status.DONE else str(result.status)


def _critical_error(result: RolloutResult) -> str | None:
    """init, run, eval or timeout; None if it is done, was cancelled, or failed by the policy's own fault."""
    if result.status is Status.TIMED_OUT:
        return "timeout"
    failure = result.failure
    if result.status is not Status.FAILED or failure is None or failure.kind is FailureKind.POLICY:
        return None
    last = result.timings[-1].stage if result.timings else Stage.INIT
    return str(failure.stage or last)


def _timing(result: RolloutResult) -> ProrlTiming:
    def busy_s(stage: Stage) -> float:
        return sum(timing.busy_s for timing in result.timings if timing.stage is stage)

    return ProrlTiming(
        init_time=busy_s(Stage.INIT),
        run_time=busy_s(Stage.RUN),
        eval_time=busy_s(Stage.EVAL),
        others_time=sum(timing.queued_s for timing in result.timings),
        counted_elapsed=sum(timing.busy_s for timing in result.timings),
        timeout_triggered=result.status is Status.TIMED_OUT,
    )
