"""How many sandboxes start at once on a node, whichever of this user's workers start them.

A slot is an abstract Unix socket: the kernel frees it when its holder ends, however that ends, and it leaves no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.01


class StartSlots:
    """``limit`` of them on this node. After ``patience_s`` without one a start goes on without: it is late, not lost."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._here = asyncio.Semaphore(limit)  # first come, first served within this process

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with self._here:
            began = time.monotonic()
            while (taken := self._take()) is None and time.monotonic() < began + self._patience_s:  # noqa: ASYNC110  (other processes' doing)
                await asyncio.sleep(_LOOK_AGAIN_S)
            if taken is None:
                log.warning("no slot for starting a sandbox became free within %g s: going on", self._patience_s)
                yield
                return
            with taken:
                yield

    def _take(self) -> socket.socket | None:
        for number in range(self._limit):
            slot = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                slot.bind(f"\0prorl-hpc/{os.getuid()}/start/{number}")
            except OSError:  # in use
                slot.close()
            else:
                return slot
        return None
