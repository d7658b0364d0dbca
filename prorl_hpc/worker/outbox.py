"""What a worker says to the coordinator: sent together in each turn of the loop, and the last report of an attempt
kept until the coordinator has it on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from prorl_hpc.messages.control import Held, StageFinished


class Outbox:
    """Invariant: every StageFinished that was said is in the Held of an attempt that lives, or in ``unacknowledged``,
    until the coordinator acknowledged or discarded it; so a Hello repeats all of them."""

    def __init__(self) -> None:
        self._queue: list[Any] = []
        self._filled = asyncio.Event()
        self._ended: dict[str, Held] = {}

    @property
    def unacknowledged(self) -> list[Held]:
        """Attempts that ended here; the last report of each may not have arrived."""
        return list(self._ended.values())

    def say(self, message: Any) -> None:
        """Send it in the next turn of the loop."""
        self._queue.append(message)
        self._filled.set()

    def keep(self, ended: Held) -> None:
        self._ended[ended.rollout_id] = ended

    def forget(self, rollout_id: str) -> Held | None:
        """The attempt's last report is not wanted any more, or is on disk."""
        return self._ended.pop(rollout_id, None)

    def acknowledge(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            self.forget(rollout_id)

    def drop_reports(self) -> None:
        """A Hello repeats them."""
        self._queue = [message for message in self._queue if not isinstance(message, StageFinished)]

    def take(self) -> list[Any]:
        """All that waits to be sent, in order."""
        taken, self._queue = self._queue, []
        self._filled.clear()
        return taken

    async def deliver(self, send_many: Callable[[list[Any]], Awaitable[None]]) -> None:
        """For ever."""
        while True:
            await self._filled.wait()
            await send_many(self.take())
