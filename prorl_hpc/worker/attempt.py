"""One attempt of a rollout as it lives on this worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from prorl_hpc.messages.control import Held, ServerRef, StageFinished
from prorl_hpc.messages.rollout import RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.protocol import Sandbox
from prorl_hpc.tasks.protocol import AgentHandler, Evaluation, RolloutContext
from prorl_hpc.worker.llms import MovableLLM

_encoder = msgspec.msgpack.Encoder()


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
        """What RUN has generated so far, encoded; after RUN, what was reported of it."""
        if (reported := reported_trajectory(self.reports)) is not None:
            return reported
        trajectory = self.context.trajectory if self.context is not None else None
        return _encoder.encode(trajectory) if trajectory is not None else None

    def outcome(self) -> tuple[Finish, int]:
        """Why the conversation ended, and how many tokens were generated in it and its branches."""
        trajectory = self.context.trajectory if self.context is not None else None
        if trajectory is None:
            return Finish.UNKNOWN, 0
        return trajectory.finish, sum(t.num_trained_tokens for t in (trajectory, *trajectory.branches))


def reported_trajectory(reports: list[StageFinished]) -> bytes | None:
    return next((report.trajectory for report in reports if report.trajectory is not None), None)
