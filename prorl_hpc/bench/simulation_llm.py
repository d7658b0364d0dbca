"""The LLM servers of a simulation: who is served where, and what the clock has to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from prorl_hpc.bench.simulation_attempt import Attempt
from prorl_hpc.bench.simulation_clock import VirtualClock
from prorl_hpc.bench.simulation_gauges import Gauges, Place
from prorl_hpc.bench.simulation_servers import SharedServer


class LlmServers:
    """Servers of one concurrency. ``served(attempt, now)`` is called when a request is over."""

    def __init__(
        self, concurrency: float, clock: VirtualClock, gauges: Gauges, served: Callable[[Attempt, float], None]
    ) -> None:
        self._concurrency, self._clock, self._gauges, self._served = concurrency, clock, gauges, served
        self._servers: dict[str, SharedServer[Attempt]] = {}
        self._planned: dict[str, float] = {}
        """The next departure of each server, as the clock knows it; other departures on the clock are off."""

    def serve(self, attempt: Attempt, work_s: float, now: float) -> None:
        """A request to the attempt's server: ``work_s`` seconds at full speed."""
        server = self._servers.get(attempt.server_id)
        if server is None:
            server = self._servers[attempt.server_id] = SharedServer(self._concurrency)
        busy = server.busy
        attempt.ticket = server.arrive(attempt, work_s, now)
        self._changed(attempt.server_id, server, busy, now)

    def stop(self, attempt: Attempt, now: float) -> float | None:
        """Take the attempt's request away; returns the seconds of work that were left, None if it had none."""
        if attempt.ticket < 0:
            return None
        server = self._servers[attempt.server_id]
        busy = server.busy
        left_s = server.remove(attempt.ticket, now)
        attempt.ticket = -1
        self._changed(attempt.server_id, server, busy, now)
        return left_s

    def move(self, attempt: Attempt, server_id: str, now: float) -> None:
        """To another server; the work done stays done."""
        left_s = self.stop(attempt, now)
        attempt.server_id = server_id
        if left_s is not None:
            self.serve(attempt, left_s, now)

    def _changed(self, server_id: str, server: SharedServer[Attempt], busy: float, now: float) -> None:
        """Put the next departure on the clock, if it is not there. ``busy``: how it was before."""
        self._gauges.add(Place.SERVED, server.busy - busy, now)
        due = server.next_due()
        if due is None:
            self._planned.pop(server_id, None)
        elif abs(due - self._planned.get(server_id, math.inf)) > 1e-9 * due:  # not for the last bit's sake
            self._planned[server_id] = due
            self._clock.at(due, self._departure, server_id)

    def _departure(self, server_id: str, now: float) -> None:
        if self._planned.get(server_id) != now:
            return
        del self._planned[server_id]
        server = self._servers[server_id]
        busy = server.busy
        attempt = server.due(now)
        self._changed(server_id, server, busy, now)
        if attempt is not None:
            attempt.ticket = -1
            self._served(attempt, now)
