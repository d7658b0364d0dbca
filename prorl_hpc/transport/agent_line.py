"""A node agent's line to the coordinator: Hello, heartbeats, and noticing that the coordinator is gone.

Hello is said once, then a heartbeat every ``heartbeat_s``; the coordinator answers each with Welcome, so silence
means that it is gone. After two unanswered heartbeats the agent looks whether a coordinator that was started anew
has published another endpoint; at the same endpoint ZeroMQ reconnects by itself. Hello is said again after every
reconnection, since what was on its way is lost, and in answer to a Welcome with ``known`` false. Silence of
``lost_after_s`` ends the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.control import Welcome
from prorl_hpc.messages.errors import RunError, TransportError
from prorl_hpc.messages.status import ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.transport.channels import DealerLine, choose_endpoint
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNANSWERED_TO_LOOK = 2
"""So many heartbeats without an answer, and the agent looks whether the coordinator has moved."""
_TICKS_TO_ANSWER_HELLO = 2
"""For so long a Hello counts as under way: what was said before it may still be answered with ``known`` false."""


class AgentLine(Generic[T]):
    """``union`` is what the coordinator sends to this kind of agent, Welcome among it. ``find_endpoint`` is asked
    again when the coordinator is silent; TransportError from it means that there is none now. ``welcomed`` is set by
    the first Welcome that knows this agent. Use inside a running event loop."""

    def __init__(
        self,
        union: Any,
        keys: RunKeys,
        identity: str,
        find_endpoint: Callable[[], str],
        *,
        heartbeat_s: float,
        lost_after_s: float,
    ) -> None:
        self._union = union
        self._keys = keys
        self._identity = identity
        self._find_endpoint = find_endpoint
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._silent_s = 0.0
        self._unanswered = 0
        self._ticks_since_hello = 0
        self._hello_wanted = asyncio.Event()
        self._inbox: asyncio.Queue[T | Exception] = asyncio.Queue()
        self.welcomed = asyncio.Event()
        self._connect(find_endpoint())

    async def send(self, message: Any) -> None:
        await self._line.send(message)

    async def send_many(self, messages: Iterable[Any]) -> None:
        """In order."""
        await self._line.send_many(messages)

    async def messages(self) -> AsyncIterator[T]:
        """Orders, for ever; Welcomes are not among them. TransportError on a message that does not decode: the two
        ends are of different versions."""
        while True:
            message = await self._inbox.get()
            if isinstance(message, Exception):
                raise message
            yield message

    async def watch(self, hello: Callable[[], Any], heartbeat: Callable[[], Awaitable[Any]]) -> None:
        """Say hello, then send heartbeats, for ever. RunError when the coordinator is lost."""
        await self._say_hello(hello)
        while True:
            # Silence is counted in ticks, not by the clock: a machine that was suspended accuses nobody.
            tick_s = min(self._heartbeat_s, self._lost_after_s / 8)
            if await self._hello_is_wanted_within(tick_s):
                await self._say_hello(hello)
                continue
            self._silent_s += tick_s
            self._ticks_since_hello += 1
            if self._silent_s > self._lost_after_s:
                raise RunError(
                    f"the coordinator at {self._line.endpoint} has not been heard for {self._silent_s:.0f} s "
                    f"(rollout.lost_after_s={self._lost_after_s:g}): see its log"
                )
            if self._unanswered >= _UNANSWERED_TO_LOOK and self._follow():
                await self._say_hello(hello)
            else:
                self._unanswered += 1
                await self.send(await heartbeat())

    def close(self) -> None:
        self._reader.cancel()
        self._line.close()

    async def _say_hello(self, hello: Callable[[], Any]) -> None:
        self._hello_wanted.clear()
        self._ticks_since_hello = 0
        await self.send(hello())

    async def _hello_is_wanted_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._hello_wanted.wait()
        except TimeoutError:
            return False

    def _take_welcome(self, welcome: Welcome) -> None:
        self._heartbeat_s = welcome.heartbeat_s
        if welcome.known:
            self.welcomed.set()
        elif self._ticks_since_hello >= _TICKS_TO_ANSWER_HELLO:
            log.warning("the coordinator at %s does not know this agent: saying hello", self._line.endpoint)
            self._hello_wanted.set()

    def _follow(self) -> bool:
        """Connect anew if the coordinator has moved; at the same endpoint ZeroMQ reconnects by itself."""
        try:
            endpoint = self._find_endpoint()
        except (TransportError, OSError) as error:
            log.warning("no coordinator to be found: %s", error)
            return False
        if endpoint == self._line.endpoint:
            return False
        log.warning("the coordinator has moved from %s to %s", self._line.endpoint, endpoint)
        self.close()
        self._connect(endpoint)
        return True

    def _connect(self, endpoint: str) -> None:
        self._unanswered = 0
        self._line: DealerLine[T] = DealerLine(
            self._union, self._keys, endpoint, self._identity, reconnected=self._hello_wanted.set
        )
        self._reader = asyncio.create_task(self._read(self._line), name=f"{self._identity} reads")

    async def _read(self, line: DealerLine[T]) -> None:
        try:
            async for message in line.messages():
                self._silent_s = 0.0
                self._unanswered = 0
                if isinstance(message, Welcome):
                    self._take_welcome(message)
                else:
                    self._inbox.put_nowait(message)
        except TransportError as error:
            self._inbox.put_nowait(error)


def find_coordinator(process: Process) -> str:
    """The ZeroMQ endpoint that the coordinator publishes, the Unix socket if it is on this node."""
    state = read_json(process.run.process_state("coordinator"), ProcessState)
    if state is None or "zmq_ipc" not in state.endpoints:
        raise TransportError(f"the coordinator has published no endpoint in {process.run.process_state('coordinator')}")
    return choose_endpoint(process.node, state.node, state.endpoints["zmq_ipc"], state.endpoints.get("zmq_tcp", ""))
