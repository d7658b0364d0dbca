"""One inference agent over real ZeroMQ, with an engine that follows a script, its coordinator and its workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from prorl_hpc.config.schema import EngineConfig, ProrlConfig, RolloutConfig
from prorl_hpc.inference.agent import InferenceAgent
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    CoordinatorToInference,
    InferenceHello,
    ServerLoad,
    ServerRef,
    Welcome,
)
from prorl_hpc.messages.inference import WorkerToInference
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

E = TypeVar("E", bound=Engine)
ENDLESS = SamplingParams(max_tokens=10**9)
PATIENCE_S = 30
_LOST_AFTER_S = 2.0


def endless(token_ids: Any, sampling: SamplingParams) -> Any:
    return range(sampling.max_tokens)


class Coordinator:
    """Welcomes the agent and keeps what it says. One that has not heard its Hello does not know it."""

    def __init__(self, keys: RunKeys, path: Path) -> None:
        self.door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, path)
        self.heard: list[Any] = []
        self._peer = b""
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for peer, message in self.door.messages():
            if isinstance(message, InferenceHello):
                self._peer = peer
            self.heard.append(message)
            if isinstance(message, InferenceHello | ServerLoad):
                await self.door.send(peer, Welcome("run", heartbeat_s=0.05, known=peer == self._peer))

    async def send(self, message: Any) -> None:
        await self.door.send(self._peer, message)

    async def next(self, type_: type, accept: Callable[[Any], bool] = lambda m: True) -> Any:
        """The first message of that kind after those already taken."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for i, message in enumerate(self.heard):
                    if isinstance(message, type_) and accept(message):
                        del self.heard[: i + 1]
                        return message
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.fall_silent()
        self.door.close()

    def fall_silent(self) -> None:
        self._task.cancel()


class Site(Generic[E]):
    """One agent, its coordinator and the means to make workers. Sites of one test share ``keys``."""

    def __init__(self, directory: Path, engine: E, slots: int, name: str, keys: RunKeys | None) -> None:
        self.keys = keys or RunKeys.create(directory / "keys")
        self.engine = engine
        self.coordinator = Coordinator(self.keys, directory / f"{name}-c.sock")
        config = ProrlConfig(
            engine=EngineConfig(max_parallel_requests=slots),
            rollout=RolloutConfig(heartbeat_s=0.05, lost_after_s=_LOST_AFTER_S),
        )
        self.door: RouterDoor[WorkerToInference] = RouterDoor(WorkerToInference, self.keys, directory / f"{name}.sock")
        self.line: AgentLine[CoordinatorToInference] = AgentLine(
            CoordinatorToInference,
            self.keys,
            name,
            lambda: self.coordinator.door.ipc,
            heartbeat_s=0.05,
            lost_after_s=_LOST_AFTER_S,
        )
        self.ref = ServerRef(name, "here", self.door.ipc, self.door.tcp)
        self.dead = False
        self.stop = asyncio.Event()
        self.welcomed = asyncio.Event()
        self.agent = InferenceAgent(self.ref, config, engine, self.door, self.line)
        self.running = asyncio.create_task(self.agent.run(self.stop, self.welcomed.set))

    def worker(self, **patience: float) -> LLMClient:
        return LLMClient("here", self.keys, "worker-0", **patience)

    def in_engine(self) -> int:
        assert isinstance(self.engine, ScriptedEngine)
        return len(self.engine._running)

    def requests(self) -> int:
        """Those in the engine and those that wait for it."""
        return len(self.agent._requests._active)

    async def die(self) -> None:
        """As if it were killed: no farewell to anybody."""
        self.door.send = self.line.send = _nothing  # type: ignore[method-assign]
        self.dead = True
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.line.close()
        self.door.close()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.gather(self.running, return_exceptions=True)
        if not self.dead:
            self.line.close()
            self.door.close()
        self.coordinator.close()


async def _nothing(*args: Any) -> None:
    return


@asynccontextmanager
async def open_site(
    directory: Path,
    engine: E,
    slots: int = 4,
    name: str = "inference-0",
    keys: RunKeys | None = None,
) -> AsyncIterator[Site[E]]:
    site = Site(directory, engine, slots, name, keys)
    try:
        yield site
    finally:
        await site.end()
