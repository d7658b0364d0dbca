"""A node agent's line to the coordinator: Hello, heartbeats, and noticing that the coordinator is gone.

The coordinator has nothing to say to an idle agent, so silence proves nothing. After half of
``lost_after_s`` of it the agent says Hello again, which a living coordinator answers with Welcome; after
all of it the coordinator is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
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


class AgentLine(Generic[T]):
    """``union`` is what the coordinator sends to this kind of agent, Welcome among it. ``find_endpoint`` is asked
    again when the coordinator is silent: one that was started anew may have moved. ``welcomed`` is set by the
    first Welcome. Use inside a running event loop."""

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
        self._inbox: asyncio.Queue[T | Exception] = asyncio.Queue()
        self.welcomed = asyncio.Event()
        self._connect(find_endpoint())

    async def send(self, message: Any) -> None:
        await self._line.send(message)

    async def messages(self) -> AsyncIterator[T]:
        """Orders, for ever; Welcomes are taken here. TransportError on a message that does not decode: the two
        ends are of different versions."""
        while True:
            message = await self._inbox.get()
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Welcome):
                self._heartbeat_s = message.heartbeat_s
                self.welcomed.set()
            else:
                yield message

    async def watch(self, hello: Callable[[], Any], heartbeat: Callable[[], Awaitable[Any]]) -> None:
        """Say hello, then send heartbeats, for ever. RunError when the coordinator is lost."""
        await self.send(hello())
        since_hello_s = 0.0
        while True:
            # Silence is counted in ticks, not by the clock: a machine that was suspended accuses nobody.
            tick_s = min(self._heartbeat_s, self._lost_after_s / 8)
            await asyncio.sleep(tick_s)
            self._silent_s += tick_s
            since_hello_s += tick_s
            if self._silent_s > self._lost_after_s:
                raise RunError(
                    f"the coordinator at {self._line.endpoint} has not been heard for {self._silent_s:.0f} s "
                    f"(rollout.lost_after_s={self._lost_after_s:g}): see its log"
                )
            if self._silent_s > self._lost_after_s / 2 and since_hello_s >= self._lost_after_s / 4:
                self._follow()
                await self.send(hello())
                since_hello_s = 0.0
            elif self.welcomed.is_set():
                await self.send(await heartbeat())

    def close(self) -> None:
        self._reader.cancel()
        self._line.close()

    def _follow(self) -> None:
        """Connect anew if the coordinator has moved; at the same endpoint ZeroMQ reconnects by itself."""
        endpoint = self._find_endpoint()
        if endpoint != self._line.endpoint:
            log.warning("the coordinator has moved from %s to %s", self._line.endpoint, endpoint)
            self.close()
            self._connect(endpoint)

    def _connect(self, endpoint: str) -> None:
        self._line: DealerLine[T] = DealerLine(self._union, self._keys, endpoint, self._identity)
        self._reader = asyncio.create_task(self._read(self._line), name=f"{self._identity} reads")

    async def _read(self, line: DealerLine[T]) -> None:
        try:
            async for message in line.messages():
                self._silent_s = 0.0
                self._inbox.put_nowait(message)
        except TransportError as error:
            self._inbox.put_nowait(error)


def find_coordinator(process: Process) -> str:
    """The ZeroMQ endpoint that the coordinator publishes, the Unix socket if it is on this node."""
    state = read_json(process.run.process_state("coordinator"), ProcessState)
    if state is None or "zmq_ipc" not in state.endpoints:
        raise TransportError(f"the coordinator has published no endpoint in {process.run.process_state('coordinator')}")
    return choose_endpoint(process.node, state.node, state.endpoints["zmq_ipc"], state.endpoints.get("zmq_tcp", ""))
