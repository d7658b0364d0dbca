"""The coordinator as a station: one CPU that serves the workers' messages one after the other."""

from __future__ import annotations

from collections.abc import Callable

from prorl_hpc.bench.simulation_clock import VirtualClock
from prorl_hpc.core.events import Event

MESSAGES_PER_ROLLOUT = 3
"""A rollout that is done ends three stages; its CPU time is spread over these messages alike."""


class CoordinatorStation:
    """``rollout_s``: its CPU time for one rollout; 0: it takes none. ``handle(event, now)`` is called when a message has
    been served: until then the scheduler does not know of it, and a slot that became free stays empty."""

    def __init__(self, rollout_s: float, clock: VirtualClock, handle: Callable[[Event, float], None]) -> None:
        self._message_s = rollout_s / MESSAGES_PER_ROLLOUT
        self._clock, self._handle = clock, handle
        self._free_at = 0.0
        self.busy_s = 0.0

    def told(self, event: Event, now: float) -> None:
        """A worker's message has come in."""
        if not self._message_s:
            self._handle(event, now)
            return
        self._free_at = max(self._free_at, now) + self._message_s
        self.busy_s += self._message_s
        self._clock.at(self._free_at, self._handle, event)
