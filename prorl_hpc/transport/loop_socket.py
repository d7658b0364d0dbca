"""A ZeroMQ socket in an asyncio loop that is drained, not awaited message by message.

ZeroMQ's file descriptor is edge-triggered: it tells of a change once, and any call on the socket may take that
word. So whoever waits looks at the socket itself first, and every send looks again on the waiter's behalf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

_BATCH = 256
"""So many messages at most are taken in one go; then the loop's other tasks have their turn."""


class LoopSocket:
    """One reader, any number of writers, all in the loop that made it. It owns ``socket``."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue frames as one message. zmq.Again if the peer's queue is full, zmq.ZMQError if there is none."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        finally:
            if self._waiter is not None:
                self._look()

    async def receive(self) -> list[list[bytes]]:
        """What has come, at least one message: each a list of frames."""
        while not (batch := self._drain()):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(batch) == _BATCH:
            await asyncio.sleep(0)
        return batch

    def close(self, linger: int | None = None) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger)

    def _drain(self) -> list[list[bytes]]:
        batch: list[list[bytes]] = []
        try:
            while len(batch) < _BATCH:
                batch.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return batch

    def _look(self) -> None:
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
