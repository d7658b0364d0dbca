"""The virtual clock: what will happen, in order.

A calendar: what happens soon lies on a small heap, the rest in buckets by time, which become the heap one after the
other. With hundreds of thousands of events ahead this is several times as fast as one heap of all, whose every
comparison would be a miss in the processor's caches.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Happening = tuple[float, int, Callable[[Any, float], None], Any]
"""(when, its number, what to call, and with what)."""


class VirtualClock:
    """``width_s``: a bucket's; any is right, and one that holds some hundred events is fast."""

    def __init__(self, width_s: float) -> None:
        self._per_second = 1.0 / max(width_s, 1e-9)
        self._soon: list[Happening] = []
        self._soon_until = 0
        """The last bucket of what happens soon."""
        self._buckets: dict[int, list[Happening]] = {}
        self._order: list[int] = []
        self._numbers = itertools.count()

    def at(self, time: float, act: Callable[[Any, float], None], what: Any) -> None:
        """Call ``act(what, time)`` then; what is due at the same time goes in the order in which it was said.
        Nothing can be taken back: ``act`` looks whether it still matters."""
        bucket = int(time * self._per_second)
        if bucket <= self._soon_until:
            heapq.heappush(self._soon, (time, next(self._numbers), act, what))
            return
        found = self._buckets.get(bucket)
        if found is None:
            found = self._buckets[bucket] = []
            heapq.heappush(self._order, bucket)
        found.append((time, next(self._numbers), act, what))

    def next(self) -> Happening | None:
        """Take out what happens next; None if nothing will."""
        if not self._soon:
            if not self._order:
                return None
            self._soon_until = heapq.heappop(self._order)
            self._soon = self._buckets.pop(self._soon_until)
            heapq.heapify(self._soon)
        return heapq.heappop(self._soon)
