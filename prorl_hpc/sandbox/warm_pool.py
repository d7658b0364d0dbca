"""Sandboxes that are started before anybody asks, so that a start takes no time.

Every sandbox here is started, answers, and is nobody's; ``take`` hands each out at most once. One that dies while it
waits is replaced, never handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached import AttachedSandbox

log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""After starts that failed in a row; the last one again and again."""


class WarmPool:
    """Keeps ``size`` sandboxes ready, one start at a time: those that somebody waits for go first."""

    def __init__(self, size: int, start: Callable[[], Awaitable[AttachedSandbox]]) -> None:
        self._size = size
        self._start = start
        self._ready: list[AttachedSandbox] = []
        self._changed = asyncio.Event()
        self._keeping = asyncio.create_task(self._keep()) if size else None
        self._watching: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, sandbox: AttachedSandbox) -> None:
        """One that is ready."""
        self._ready.append(sandbox)
        watch = asyncio.create_task(self._watch(sandbox))
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)

    def take(self) -> AttachedSandbox | None:
        """A living one, the oldest first; None when there is none at the moment."""
        while self._ready:
            sandbox = self._ready.pop(0)
            self._changed.set()
            if sandbox.alive:
                return sandbox
        return None

    async def close(self) -> None:
        """No more starts; stopping the sandboxes is left to the runtime, which knows all that it started."""
        tasks = [*self._watching, *([self._keeping] if self._keeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ready.clear()

    async def _keep(self) -> None:
        failures = 0
        while True:
            self._changed.clear()
            if len(self._ready) >= self._size:
                await self._changed.wait()
                continue
            try:
                self.add(await self._start())
                failures = 0
            except SandboxError as error:
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                failures += 1
                log.warning("a sandbox to keep ready did not start, again in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)

    async def _watch(self, sandbox: AttachedSandbox) -> None:
        await sandbox.ended()
        if sandbox in self._ready:
            self._ready.remove(sandbox)
            log.warning("a sandbox that was kept ready ended by itself; another takes its place")
            with contextlib.suppress(SandboxError):  # the runtime's ``close`` tries again, and says so
                await sandbox.stop()
            self._changed.set()
