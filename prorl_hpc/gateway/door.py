"""Connections to the gateway: whoever can reach its socket can hold them open, with a key or without, so that they are
few and none is idle for long."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

IDLE_S = 10.0
MOST_WAITING = 64
"""Connections that are not accepted yet; asyncio accepts so many at once."""
_MOST = 4096


def most_connections() -> int:
    """A quarter of the files that this process may have open; the rest is for its sandboxes and lines."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(16, min(_MOST, soft // 4))


def door_protocol(idle_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which closes connections on which no request comes within ``idle_s`` after they were opened or
    answered. Where there are too many, the one that has been idle longest makes place; if none is, the new one is
    refused."""

    class DoorProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at import
        refused = False
        opened = 0.0
        look: asyncio.TimerHandle | None = None
        answered: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            if len(self.connections) >= most_connections() and not _make_place(self.connections):
                self.refused = True
                transport.abort()
                return
            super().connection_made(transport)
            self.opened = time.monotonic()
            self.look = self.loop.call_later(idle_s, self.close_if_idle)

        def data_received(self, data: bytes) -> None:
            if not self.refused:
                super().data_received(data)

        def eof_received(self) -> None:
            if not self.refused:
                super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.look is not None:
                self.look.cancel()
            if not self.refused:
                super().connection_lost(exc)

        def idle(self) -> bool:
            """No request is being answered, or all of its head has not come."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def close_if_idle(self) -> None:
            # What was answered since the last look may be followed by another request.
            if self.idle() and self.cycle is self.answered:
                self.transport.abort()
                return
            self.answered = self.cycle
            self.look = self.loop.call_later(idle_s, self.close_if_idle)

    return DoorProtocol


def _make_place(connections: set[Any]) -> bool:
    """Whether an idle one could be closed."""
    idle = [connection for connection in connections if connection.idle()]
    if not idle:
        return False
    oldest = min(idle, key=lambda connection: connection.opened)
    oldest.transport.abort()
    # Its connection_lost comes in the loop's next turn.
    connections.discard(oldest)
    return True
