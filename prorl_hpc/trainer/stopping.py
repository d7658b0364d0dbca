"""Stopping in order: SIGTERM, SIGINT or SIGUSR2 at any moment, noticed at the next layer, micro-batch or await."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Slurm sends the first at the end of a job, a terminal the second; the third is what jobs ask Slurm for ahead of their end."""


class Stopped(Exception):
    """Someone asked this process to stop; raised where it is safe to leave off."""


class StopSignal:
    """Remembers that the process was asked to stop. The handlers are plain ones, not asyncio's, since training blocks
    the event loop and must notice them too."""

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._exit_at_once: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None

    def install(self, exit_at_once: Callable[[], None]) -> None:
        """Take over SIGTERM, SIGINT and SIGUSR2. Until ``loaded``, there is nothing to save: ``exit_at_once`` is called, then
        the process ends with code 0."""
        self._exit_at_once = exit_at_once
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def loaded(self) -> None:
        """From now on a stop is noticed by ``check`` and ``guard``."""
        self._exit_at_once = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._exit_at_once is not None:
            self._exit_at_once()
            os._exit(0)
        self.request()

    def request(self) -> None:
        if not self.requested:
            self._requested_at = time.monotonic()
        self.requested = True
        if self._loop is not None and self._event is not None:
            self._loop.call_soon_threadsafe(self._event.set)

    @property
    def when(self) -> str:
        """How long ago the stop was asked for, in words."""
        if not self.requested:
            return "by a signal to another rank"
        return f"{time.monotonic() - self._requested_at:.1f} s after the signal"

    def check(self) -> None:
        """Raises Stopped if a stop was asked for."""
        if self.requested:
            raise Stopped

    async def guard(self, work: Awaitable[T]) -> T:
        """Await ``work``; when a stop is asked for, cancel it and raise Stopped."""
        if self._event is None:
            self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        if self.requested:
            self._event.set()
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self.requested:
                return task.result()
            raise Stopped
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
            # Its own outcome no longer matters; gathering it keeps asyncio from reporting it as never retrieved.
            await asyncio.gather(task, stop, return_exceptions=True)
