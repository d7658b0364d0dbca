"""An LLM server as a processor that is shared: n requests run at full speed up to its concurrency c, at c/n beyond.

Exact: all requests on a server go on at the same speed, so the server has one clock of work done per request, and
a request that arrives with w seconds of work is over when this clock has gone on by w. Only arrivals and departures
change the speed; between them the next departure is known.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

Request = TypeVar("Request")


class SharedServer(Generic[Request]):
    """One server. After ``arrive``, ``remove`` and ``due`` the next departure may be another: see ``next_due``."""

    def __init__(self, concurrency: float) -> None:
        self._concurrency = concurrency
        self._clock = 0.0
        """Seconds of work that a request had done which was there from the start."""
        self._now = 0.0
        self._queue: list[tuple[float, int, Request]] = []
        self._ends: dict[int, float] = {}
        self._tickets = itertools.count()
        self.version = 0
        """Changes when a departure that was foretold is off."""

    @property
    def busy(self) -> float:
        """Requests' worth of full speed in use."""
        return min(float(len(self._ends)), self._concurrency)

    def arrive(self, request: Request, work_s: float, now: float) -> int:
        """Returns the request's ticket."""
        self._advance(now)
        ticket = next(self._tickets)
        self._ends[ticket] = self._clock + work_s
        heapq.heappush(self._queue, (self._clock + work_s, ticket, request))
        return ticket

    def remove(self, ticket: int, now: float) -> float:
        """Take a request away; returns its work that is left, seconds at full speed."""
        self._advance(now)
        return max(0.0, self._ends.pop(ticket) - self._clock)

    def next_due(self) -> float | None:
        """When the next request is over, if none arrives and none is removed before; None if there is none."""
        while self._queue and self._queue[0][1] not in self._ends:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        return self._now + max(0.0, self._queue[0][0] - self._clock) / self._speed

    def due(self, now: float) -> Request | None:
        """The request whose departure was foretold for ``now``."""
        if self.next_due() is None:
            return None
        end, ticket, request = heapq.heappop(self._queue)
        # Its end, not the sum of many small steps: rounding must not leave a rest of work behind.
        self._clock, self._now = max(self._clock, end), now
        del self._ends[ticket]
        return request

    @property
    def _speed(self) -> float:
        n = len(self._ends)
        return 1.0 if n <= self._concurrency else self._concurrency / n

    def _advance(self, now: float) -> None:
        self._clock += (now - self._now) * self._speed
        self._now = now
