"""Messages to agents: those of one moment travel together, in order; a peer that is gone loses them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from prorl_hpc.messages.control import Acknowledge


class Door(Protocol):
    """transport.channels.RouterDoor, as far as it sends."""

    async def send_many(self, peer: bytes, messages: list[Any]) -> None: ...


class Outbox:
    """``post`` and ``acknowledge`` at any time; ``run`` sends."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._posted: dict[bytes, list[Any]] = {}
        self._acknowledged: dict[bytes, list[str]] = {}
        self._something = asyncio.Event()

    def post(self, peer: bytes, message: Any) -> None:
        self._posted.setdefault(peer, []).append(message)
        self._something.set()

    def acknowledge(self, peer: bytes, attempt_id: str) -> None:
        """The attempt's last report is on disk."""
        self._acknowledged.setdefault(peer, []).append(attempt_id)
        self._something.set()

    async def run(self) -> None:
        while True:
            await self._something.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send all that is posted."""
        self._something.clear()
        acknowledged, self._acknowledged = self._acknowledged, {}
        for peer, attempt_ids in acknowledged.items():
            self._posted.setdefault(peer, []).append(Acknowledge(attempt_ids))
        posted, self._posted = self._posted, {}
        for peer, messages in posted.items():
            await self._door.send_many(peer, messages)
