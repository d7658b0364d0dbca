"""A fake coordinator behind a real ZeroMQ door, and a worker with fake sandboxes and a scripted LLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prorl_hpc.messages.control import (
    AgentToCoordinator,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
    Welcome,
)
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.sandbox.fake import FakeRuntime
from prorl_hpc.tasks.protocol import LLM
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

M = TypeVar("M")
PATIENCE_S = 20.0
SERVER = ServerRef("server-0", "node-a", "ipc:///none", "")


class FakeCoordinator:
    """Welcomes agents and keeps what they say. ``mute`` makes it deaf and dumb."""

    def __init__(self, keys: RunKeys, ipc_path: Path, heartbeat_s: float) -> None:
        self._door: RouterDoor[Any] = RouterDoor(AgentToCoordinator, keys, ipc_path)
        self._heartbeat_s = heartbeat_s
        self._peer = b""
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())
        self.endpoint = self._door.ipc
        self.mute = False
        self.log: list[Any] = []

    async def _read(self) -> None:
        async for peer, message in self._door.messages():
            if self.mute:
                continue
            self._peer = peer
            self.log.append(message)
            self._heard.put_nowait(message)
            if type(message).__name__ == "WorkerHello":
                await self._door.send(peer, Welcome("run-0", self._heartbeat_s))

    async def expect(self, type_: type[M]) -> M:
        """The next message of this type; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._heard.get()
                if isinstance(message, type_):
                    return message

    async def order(self, message: Any) -> None:
        await self._door.send(self._peer, message)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._door.close()
        # The door's ZAP task ends in the next turns of the loop, and takes its file descriptor's reader along.
        for _ in range(10):
            await asyncio.sleep(0)


@dataclass
class FakeLLMs:
    """Gives every rollout the same scripted LLM."""

    llm: LLM
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def for_rollout(self, server: ServerRef, rollout_id: str, priority: int) -> LLM:
        self.asked.append((server.server_id, rollout_id, priority))
        return self.llm


@dataclass
class Bench:
    """One worker under test and what surrounds it."""

    coordinator: FakeCoordinator
    runtime: FakeRuntime
    llms: FakeLLMs
    stop: asyncio.Event
    running: asyncio.Task[str]

    @property
    def sandboxes(self) -> list[str]:
        """Those that run."""
        return [sandbox.sandbox_id for sandbox in self.runtime.started if not sandbox.stopped]

    async def init(self, rollout_id: str, budget_s: float = PATIENCE_S, **row: Any) -> StageFinished:
        await self.start_init(rollout_id, budget_s, **row)
        return await self.coordinator.expect(StageFinished)

    async def start_init(self, rollout_id: str, budget_s: float = PATIENCE_S, **row: Any) -> None:
        spec = RolloutSpec(rollout_id, "staged_task:StagedTask", {"id": rollout_id, **row}, priority=7)
        await self.coordinator.order(StartInit(spec, budget_s))

    async def run(self, rollout_id: str, budget_s: float = PATIENCE_S) -> StageFinished:
        await self.coordinator.order(StartRun(rollout_id, SERVER, budget_s))
        return await self.coordinator.expect(StageFinished)

    async def eval(self, rollout_id: str, budget_s: float = PATIENCE_S) -> StageFinished:
        await self.coordinator.order(StartEval(rollout_id, budget_s))
        return await self.coordinator.expect(StageFinished)

    async def until_no_sandbox_runs(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.sandboxes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_a_sandbox_runs(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.sandboxes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
