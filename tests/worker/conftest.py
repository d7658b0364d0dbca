"""A fake coordinator behind a real ZeroMQ door, and a worker with fake sandboxes and a scripted LLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import ProrlConfig
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
from prorl_hpc.tasks.protocol import LLM
from prorl_hpc.tasks.testing import FakeRuntime, ScriptedLLM, write_chat_model
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Worker
from prorl_hpc.worker.stages import Policy

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
            while self.runtime.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_a_sandbox_runs(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.runtime.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.create(tmp_path / "keys")


@pytest.fixture
def config() -> ProrlConfig:
    config = ProrlConfig()
    config.task.name = "staged_task:StagedTask"
    config.rollout.heartbeat_s = 0.05
    return config


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
async def bench(
    tmp_path: Path, keys: RunKeys, config: ProrlConfig, chat: ChatFormat, runtime: FakeRuntime
) -> AsyncIterator[Bench]:
    coordinator = FakeCoordinator(keys, tmp_path / "c.sock", config.rollout.heartbeat_s)
    llms = FakeLLMs(ScriptedLLM(chat, lambda prompt: "hello"))
    policy = Policy(chat, max_context_tokens=512, max_turn_tokens=64)
    worker = Worker("worker-0", "node-a", config, keys, runtime, llms, policy, lambda: coordinator.endpoint)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    bench = Bench(coordinator, runtime, llms, stop, running)
    yield bench
    stop.set()
    with contextlib.suppress(Exception):
        async with asyncio.timeout(PATIENCE_S):
            await running
    await bench.coordinator.close()  # a test may have put another one in its place
    assert runtime.running == []
