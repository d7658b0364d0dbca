"""One attempt of a rollout as it lives on this worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from prorl_hpc.messages.control import Held, ServerRef, StageFinished
from prorl_hpc.messages.errors import ProrlError
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.protocol import Sandbox
from prorl_hpc.tasks.protocol import AgentHandler, Evaluation, RolloutContext
from prorl_hpc.transport.channels import MAX_MESSAGE_BYTES
from prorl_hpc.worker.llms import MovableLLM

MAX_TRAJECTORY_BYTES = MAX_MESSAGE_BYTES // 4
"""Of one rollout, encoded. A Hello holds several."""
_MAX_MESSAGE_CHARS = 16384
"""Of a failure."""
_encoder = msgspec.msgpack.Encoder()


class TrajectoryError(ProrlError):
    """What RUN has generated cannot be reported."""


@dataclass
class Attempt:
    """``running``: the stage at work. ``server``: where RUN is, or is to be."""

    spec: RolloutSpec
    handler: AgentHandler | None = None
    sandbox: Sandbox | None = None
    context: RolloutContext | None = None
    llm: MovableLLM | None = None
    server: ServerRef | None = None
    evaluation: Evaluation | None = None
    reports: list[StageFinished] = field(default_factory=list)
    running: Stage | None = None
    discarded: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def rollout_id(self) -> str:
        return self.spec.rollout_id

    @property
    def awaits_eval(self) -> bool:
        return bool(self.reports) and self.reports[-1].stage is Stage.RUN

    def held(self) -> Held:
        """What the coordinator is told of it."""
        server = self.server if self.running is Stage.RUN else None
        return Held(self.rollout_id, list(self.reports), self.running, server)

    def trajectory(self) -> bytes | None:
        """What RUN has generated so far, encoded; after RUN, what was reported of it. Raises TrajectoryError."""
        if (reported := reported_trajectory(self.reports)) is not None:
            return reported
        try:
            trajectory = self.context.trajectory if self.context is not None else None
            encoded = _encoder.encode(trajectory) if trajectory is not None else None
        except Exception as error:  # of whatever a handler or an agent has put there
            raise TrajectoryError(f"the trajectory cannot be encoded: {type(error).__name__}: {error}") from error
        if encoded is not None and len(encoded) > MAX_TRAJECTORY_BYTES:
            raise TrajectoryError(
                f"the trajectory has {len(encoded)} bytes, at most {MAX_TRAJECTORY_BYTES} can be sent: bound it by "
                "agent.max_tokens, task.max_turns or model.max_context_tokens"
            )
        return encoded

    def outcome(self) -> tuple[Finish, int]:
        """Why the conversation ended, and how many tokens were generated in it and its branches."""
        trajectory = self.context.trajectory if self.context is not None else None
        if trajectory is None:
            return Finish.UNKNOWN, 0
        return trajectory.finish, sum(t.num_trained_tokens for t in (trajectory, *trajectory.branches))


def sendable(report: StageFinished) -> StageFinished:
    """``report``, or one of a failure in its place if no message can carry it: a task may score and say anything."""
    if (failure := report.failure) is not None:
        report = msgspec.structs.replace(
            report, failure=msgspec.structs.replace(failure, message=_plain(failure.message))
        )
    try:
        _encoder.encode(msgspec.structs.replace(report, trajectory=None))
    except Exception as error:
        message = _plain(f"the report of {report.stage} cannot be encoded: {type(error).__name__}: {error}")
        failure = Failure(report.stage, FailureKind.TASK, message)
        return StageFinished(report.worker_id, report.rollout_id, report.stage, failure, busy_s=report.busy_s)
    return report


def _plain(text: str) -> str:
    """Of bounded length, and without halves of surrogate pairs, which UTF-8 does not have."""
    return text[:_MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()


def reported_trajectory(reports: list[StageFinished]) -> bytes | None:
    return next((report.trajectory for report in reports if report.trajectory is not None), None)
