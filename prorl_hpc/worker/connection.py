"""A worker's line to the coordinator: Hello, heartbeats, and noticing that the coordinator is gone.

The coordinator has nothing to say to an idle worker, so silence proves nothing. After half of
``lost_after_s`` of it the worker says Hello again, which a living coordinator answers; after all of it
the coordinator is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from prorl_hpc.messages.control import CoordinatorToWorker, Shutdown, Welcome, WorkerHello, WorkerLoad
from prorl_hpc.messages.errors import RunError, TransportError
from prorl_hpc.transport.channels import DealerLine
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger(__name__)


class CoordinatorLine:
    """Says Hello when ``watch`` starts. ``welcomed`` is set by the first Welcome."""

    def __init__(
        self,
        keys: RunKeys,
        identity: str,
        find_endpoint: Callable[[], str],
        hello: Callable[[], WorkerHello],
        load: Callable[[], WorkerLoad],
        *,
        heartbeat_s: float,
        lost_after_s: float,
    ) -> None:
        """``find_endpoint`` is asked again when the coordinator is silent: a restarted one may have moved."""
        self._keys = keys
        self._find_endpoint = find_endpoint
        self._hello = hello
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._identity = identity
        self._heard = time.monotonic()
        self._inbox: asyncio.Queue[CoordinatorToWorker | Exception] = asyncio.Queue()
        self.welcomed = asyncio.Event()
        self._connect(find_endpoint())

    async def send(self, message: Any) -> None:
        await self._line.send(message)

    async def messages(self) -> AsyncIterator[CoordinatorToWorker]:
        """Orders until Shutdown (the last one yielded); Welcomes are taken here. Raises TransportError on a
        message that does not decode: the two ends are of different versions."""
        while True:
            message = await self._inbox.get()
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Welcome):
                self._heartbeat_s = message.heartbeat_s
                self.welcomed.set()
                continue
            yield message
            if isinstance(message, Shutdown):
                return

    async def watch(self) -> None:
        """Hello, then heartbeats, for ever. Raises RunError when the coordinator is lost."""
        await self.send(self._hello())
        last_hello = time.monotonic()
        while True:
            await asyncio.sleep(min(self._heartbeat_s, self._lost_after_s / 4))
            now = time.monotonic()
            silent_s = now - self._heard
            if silent_s > self._lost_after_s:
                raise RunError(
                    f"the coordinator at {self._line.endpoint} has not been heard for {silent_s:.0f} s "
                    f"(rollout.lost_after_s={self._lost_after_s:g}): see its log"
                )
            if silent_s > self._lost_after_s / 2 and now - last_hello >= self._lost_after_s / 4:
                log.debug("nothing heard from the coordinator for %.1f s: saying Hello again", silent_s)
                self._follow()
                await self.send(self._hello())
                last_hello = now
            elif self.welcomed.is_set():
                await self.send(self._load())

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
        self._line: DealerLine[CoordinatorToWorker] = DealerLine(
            CoordinatorToWorker, self._keys, endpoint, self._identity
        )
        self._reader = asyncio.create_task(self._read(self._line))

    async def _read(self, line: DealerLine[CoordinatorToWorker]) -> None:
        try:
            async for message in line.messages():
                self._heard = time.monotonic()
                self._inbox.put_nowait(message)
        except TransportError as error:
            self._inbox.put_nowait(error)
