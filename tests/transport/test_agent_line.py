"""The line between an agent and the coordinator: Hello once, answered heartbeats, loss and return."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.messages.control import (
    AgentToCoordinator,
    CoordinatorToWorker,
    Discard,
    Pools,
    Welcome,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.errors import RunError, TransportError
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

PATIENCE_S = 20
HELLO = WorkerHello("w0", "here", Pools(), "fake")
LOAD = WorkerLoad("w0", 0)


class Coordinator:
    """``answer`` makes the Welcome to each message; None is silence."""

    def __init__(self, keys: RunKeys, path: Path, answer: Callable[[Any], Welcome | None]) -> None:
        self.door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, path, "127.0.0.1")
        self.answer = answer
        self.heard: list[Any] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for peer, message in self.door.messages():
            self.heard.append(message)
            welcome = self.answer(message)
            if welcome is not None:
                await self.door.send(peer, welcome)

    @property
    def hellos(self) -> int:
        return self.heard.count(HELLO)

    def close(self) -> None:
        self._task.cancel()
        self.door.close()


def always(message: Any) -> Welcome:
    return Welcome("run", 0.02)


def after_hello() -> Callable[[Any], Welcome]:
    """A coordinator that was started anew, or has given up its agents."""
    known = False

    def answer(message: Any) -> Welcome:
        nonlocal known
        known = known or message == HELLO
        return Welcome("run", 0.02, known)

    return answer


class Site:
    def __init__(self, keys: RunKeys, endpoint: str, lost_after_s: float) -> None:
        self.endpoint: str | None = endpoint
        self.line: AgentLine[CoordinatorToWorker] = AgentLine(
            CoordinatorToWorker, keys, "w0", self._find, heartbeat_s=0.02, lost_after_s=lost_after_s
        )
        self.watching = asyncio.create_task(self.line.watch(lambda: HELLO, self._load))

    def _find(self) -> str:
        if self.endpoint is None:
            raise TransportError("nothing is published")
        return self.endpoint

    async def _load(self) -> WorkerLoad:
        return LOAD


@contextlib.asynccontextmanager
async def agent_of(keys: RunKeys, endpoint: str, lost_after_s: float = 30.0) -> AsyncIterator[Site]:
    site = Site(keys, endpoint, lost_after_s)
    yield site
    site.watching.cancel()
    await asyncio.gather(site.watching, return_exceptions=True)
    site.line.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_hello_is_said_once_while_heartbeats_are_answered(keys: RunKeys, tmp_path: Path) -> None:
    coordinator = Coordinator(keys, tmp_path / "c", always)
    async with agent_of(keys, coordinator.door.ipc) as site:
        await until(lambda: coordinator.heard.count(LOAD) >= 10)
        assert coordinator.hellos == 1
        assert site.line.welcomed.is_set()
        await coordinator.door.send(b"w0", Discard("r1"))
        async with asyncio.timeout(PATIENCE_S):
            assert await anext(site.line.messages()) == Discard("r1")
    coordinator.close()


async def test_an_agent_that_is_not_known_says_hello(keys: RunKeys, tmp_path: Path) -> None:
    coordinator = Coordinator(keys, tmp_path / "c", always)
    async with agent_of(keys, coordinator.door.ipc):
        await until(lambda: coordinator.heard.count(LOAD) >= 3)
        coordinator.answer = after_hello()
        await until(lambda: coordinator.hellos == 2)
        heartbeats = coordinator.heard.count(LOAD)
        await until(lambda: coordinator.heard.count(LOAD) >= heartbeats + 10)
        assert coordinator.hellos == 2
    coordinator.close()


async def test_a_coordinator_that_moved_is_followed(keys: RunKeys, tmp_path: Path) -> None:
    first = Coordinator(keys, tmp_path / "c1", always)
    async with agent_of(keys, first.door.ipc) as site:
        await until(lambda: first.heard.count(LOAD))
        first.close()
        site.endpoint = None  # between the two there is nothing
        await asyncio.sleep(0.1)
        second = Coordinator(keys, tmp_path / "c2", after_hello())
        site.endpoint = second.door.ipc
        await until(lambda: second.heard.count(LOAD) >= 3)
        assert second.heard[0] == HELLO
    second.close()


async def test_a_new_coordinator_at_the_same_endpoint_hears_hello(keys: RunKeys, tmp_path: Path) -> None:
    first = Coordinator(keys, tmp_path / "c", always)
    async with agent_of(keys, first.door.ipc):
        await until(lambda: first.heard.count(LOAD))
        first.close()
        second = Coordinator(keys, tmp_path / "c", after_hello())
        await until(lambda: second.hellos and second.heard[-1] == LOAD)
    second.close()


async def test_hello_is_said_again_when_the_line_was_cut(keys: RunKeys, tmp_path: Path) -> None:
    """The coordinator knows the agent all the time, but messages may be lost."""
    coordinator = Coordinator(keys, tmp_path / "c", always)
    port = int(coordinator.door.tcp.rpartition(":")[2])
    connections: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", port)
        connections.extend((writer, onward))
        await asyncio.gather(pipe(reader, onward), pipe(onward_reader, writer))

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with agent_of(keys, f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"):
        await until(lambda: coordinator.heard.count(LOAD) >= 3)
        assert coordinator.hellos == 1
        for writer in connections:
            writer.transport.abort()
        await until(lambda: coordinator.hellos == 2)
    proxy.close()
    for writer in connections:
        writer.transport.abort()
    coordinator.close()


async def test_a_coordinator_that_stays_silent_is_lost(keys: RunKeys, tmp_path: Path) -> None:
    coordinator = Coordinator(keys, tmp_path / "c", always)
    async with agent_of(keys, coordinator.door.ipc, lost_after_s=0.5) as site:
        await until(lambda: coordinator.heard.count(LOAD))
        coordinator.answer = lambda message: None
        with pytest.raises(RunError, match=r"has not been heard for .* \(rollout.lost_after_s=0.5\)"):
            async with asyncio.timeout(PATIENCE_S):
                await site.watching
    coordinator.close()


async def test_a_message_that_does_not_decode_ends_the_line(keys: RunKeys, tmp_path: Path) -> None:
    coordinator = Coordinator(keys, tmp_path / "c", always)
    async with agent_of(keys, coordinator.door.ipc) as site:
        await until(lambda: coordinator.heard)
        await coordinator.door.send(b"w0", LOAD)
        with pytest.raises(TransportError, match="does not decode"):
            async with asyncio.timeout(PATIENCE_S):
                await anext(site.line.messages())
    coordinator.close()
