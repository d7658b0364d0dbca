"""Who waits for the end of what."""

from __future__ import annotations

import asyncio

from prorl_hpc.messages.errors import ServiceError

Subject = tuple[str, str]
"""(``batch`` or ``rollout``, id)"""


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[Subject, list[asyncio.Future[None]]] = {}
        self._closed = False

    async def wait(self, subject: Subject, wait_s: float) -> None:
        """Until it is woken, or ``wait_s`` seconds. Raises 503 when the service ends."""
        if not self._closed and wait_s > 0:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(subject, []).append(woken)
            await asyncio.wait({woken}, timeout=wait_s)
            if not woken.done():
                self._leave(subject, woken)
        if self._closed:
            raise ServiceError("the rollout service is shutting down", code="shutting_down", status=503)

    def wake(self, subject: Subject) -> None:
        for woken in self._waiting.pop(subject, ()):
            if not woken.done():
                woken.set_result(None)

    def close(self) -> None:
        """The service ends: who waits is told so."""
        self._closed = True
        for subject in list(self._waiting):
            self.wake(subject)

    def _leave(self, subject: Subject, woken: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(subject, [])
        if woken in waiting:
            waiting.remove(woken)
        if not waiting:
            self._waiting.pop(subject, None)
