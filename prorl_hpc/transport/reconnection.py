"""Noticing that a line was cut and is up again: what was on its way is lost then, and nobody else would tell."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import zmq

from prorl_hpc.transport.loop_socket import LoopSocket

_numbers = itertools.count()


class ReconnectionWatch:
    """Calls ``reconnected`` after every handshake of ``socket`` but the first. Make it before the socket connects."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], reconnected: Callable[[], None]
    ) -> None:
        address = f"inproc://line-monitor-{next(_numbers)}"
        socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor = context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # a full one would block ZeroMQ's own thread
        monitor.connect(address)
        self._monitor = LoopSocket(monitor)
        self._task = asyncio.create_task(self._watch(reconnected))

    async def _watch(self, reconnected: Callable[[], None]) -> None:
        connected = False
        while True:
            for _ in await self._monitor.receive():
                if connected:
                    reconnected()
                connected = True

    def close(self) -> None:
        self._task.cancel()
        self._monitor.close(linger=0)
