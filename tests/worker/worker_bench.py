"""A fake coordinator behind a real ZeroMQ door, and a worker with fake sandboxes and a scripted LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prorl_hpc.messages.control import (
    Acknowledge,
    AgentToCoordinator,
    Discarded,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
    Welcome,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams, Stage
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.sandbox.fake import FakeRuntime
from prorl_hpc.tasks.protocol import LLM
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Worker

M = TypeVar("M")
_trajectory = msgspec.msgpack.Decoder(Trajectory)
PATIENCE_S = 20.0
SERVER = ServerRef("server-0", "node-a", "ipc:///none", "")


def trajectory_of(report: StageFinished | Discarded) -> Trajectory | None:
    """What the coordinator never looks into."""
    return None if report.trajectory is None else _trajectory.decode(report.trajectory)


def is_last(report: StageFinished) -> bool:
    return report.failure is not None or report.stage is Stage.EVAL


class FakeCoordinator:
    """Welcomes the worker and keeps what it says. ``mute`` makes it deaf and dumb; without ``knows`` it answers
    heartbeats as one that was started anew, or has given the worker up. ``acknowledges``: last reports, at once."""

    def __init__(self, keys: RunKeys, ipc_path: Path, heartbeat_s: float) -> None:
        self._door: RouterDoor[Any] = RouterDoor(AgentToCoordinator, keys, ipc_path)
        self._heartbeat_s = heartbeat_s
        self._peer = b""
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())
        self.endpoint = self._door.ipc
        self.mute = False
        self.knows = False
        self.acknowledges = True
        self.log: list[Any] = []

    async def _read(self) -> None:
        async for peer, message in self._door.messages():
            if self.mute:
                continue
            self._peer = peer
            self.log.append(message)
            self._heard.put_nowait(message)
            if isinstance(message, WorkerHello):
                self.knows = True
            if isinstance(message, WorkerHello | WorkerLoad):
                await self._door.send(peer, Welcome("run-0", self._heartbeat_s, self.knows))
            if isinstance(message, StageFinished) and self.acknowledges and is_last(message):
                await self._door.send(peer, Acknowledge([message.rollout_id]))

    async def expect(self, type_: type[M]) -> M:
        """The next message of this type; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._heard.get()
                if isinstance(message, type_):
                    return message

    async def order(self, *messages: Any, to: str = "") -> None:
        """To the worker that was heard last, unless one is named."""
        await self._door.send_many(to.encode() or self._peer, messages)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._door.close()


class FakeRolloutLLM:
    """Asks ``llm``, unless its server is ``down``: then it tells of the trouble and waits to be moved."""

    def __init__(self, llms: FakeLLMs, server: ServerRef, trouble: Callable[[str, str], None] | None) -> None:
        self._llms = llms
        self._server: ServerRef | None = server
        self._trouble = trouble
        self._moved = asyncio.Event()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        while self._server is not None and self._server.server_id in self._llms.down:
            if self._trouble is None:
                raise InferenceError(f"{self._server.server_id} does not answer")
            self._moved.clear()
            self._trouble(self._server.server_id, "does not answer")
            await self._moved.wait()
        if self._server is None:
            raise InferenceError("no other server")
        self._llms.answered_by.append(self._server.server_id)
        return await self._llms.llm.generate(token_ids, sampling)

    def move(self, server: ServerRef | None) -> None:
        self._server = server
        self._moved.set()


@dataclass
class FakeLLMs:
    """Gives every rollout the same scripted LLM behind whatever server it is assigned to."""

    llm: LLM
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    answered_by: list[str] = field(default_factory=list)

    def for_rollout(
        self, server: ServerRef, rollout_id: str, priority: int, trouble: Callable[[str, str], None] | None
    ) -> FakeRolloutLLM:
        self.asked.append((server.server_id, rollout_id, priority))
        return FakeRolloutLLM(self, server, trouble)


@dataclass
class Bench:
    """One worker under test and what surrounds it."""

    coordinator: FakeCoordinator
    runtime: FakeRuntime
    llms: FakeLLMs
    worker: Worker
    stop: asyncio.Event
    running: asyncio.Task[str]
    task: str

    @property
    def sandboxes(self) -> list[str]:
        """Those that run."""
        return [sandbox.sandbox_id for sandbox in self.runtime.started if not sandbox.stopped]

    async def init(self, rollout_id: str, budget_s: float = PATIENCE_S, **row: Any) -> StageFinished:
        await self.start_init(rollout_id, budget_s, **row)
        return await self.coordinator.expect(StageFinished)

    async def start_init(self, rollout_id: str, budget_s: float = PATIENCE_S, **row: Any) -> None:
        spec = RolloutSpec(rollout_id, self.task, {"id": rollout_id, **row}, priority=7)
        await self.coordinator.order(StartInit(spec, budget_s))

    async def run(self, rollout_id: str, budget_s: float = PATIENCE_S) -> StageFinished:
        await self.coordinator.order(StartRun(rollout_id, SERVER, budget_s))
        return await self.coordinator.expect(StageFinished)

    async def eval(self, rollout_id: str, budget_s: float = PATIENCE_S) -> StageFinished:
        await self.coordinator.order(StartEval(rollout_id, budget_s))
        return await self.coordinator.expect(StageFinished)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_no_sandbox_runs(self) -> None:
        await self.until(lambda: not self.sandboxes)

    async def until_a_sandbox_runs(self) -> None:
        await self.until(lambda: self.sandboxes)
