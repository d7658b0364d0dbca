"""A min-heap of things by load, where loads change and things leave at any time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

Load = TypeVar("Load", float, tuple[float, float])


class LeastLoaded(Generic[Load]):
    """Keys with a load each; ``least`` finds the smallest in O(log n).

    Among equal loads the one whose load was set longest ago wins, so that ties rotate. A key has one heap entry that
    counts, which is never above its load: a load that falls gets a new entry, one that rises is put in its place
    when the entry surfaces. Entries that count no more are dropped when they surface, or all at once when they
    outnumber the others.
    """

    def __init__(self) -> None:
        self._loads: dict[str, tuple[Load, int]] = {}
        self._counted: dict[str, tuple[Load, int]] = {}
        self._heap: list[tuple[Load, int, str]] = []
        self._turns = itertools.count()

    def __contains__(self, key: str) -> bool:
        return key in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def set(self, key: str, load: Load) -> None:
        """Add ``key`` or change its load."""
        known = self._loads.get(key)
        if known is not None and known[0] == load:
            return
        turn = next(self._turns)
        current = (load, turn)
        self._loads[key] = current
        if known is not None and self._counted[key] < current:
            return
        self._counted[key] = current
        heapq.heappush(self._heap, (load, turn, key))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._counted = dict(self._loads)
            self._heap = [(load, turn, key) for key, (load, turn) in self._loads.items()]
            heapq.heapify(self._heap)

    def discard(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        if self._loads.pop(key, None) is not None:
            del self._counted[key]

    def least(self, without: Collection[str] = ()) -> str | None:
        """The key with the smallest load that is not in ``without``; None if there is none."""
        heap, found = self._heap, None
        skipped: list[tuple[Load, int, str]] = []
        while heap:
            load, turn, key = heap[0]
            current = self._loads.get(key)
            if current is None or self._counted[key] != (load, turn):
                heapq.heappop(heap)
            elif current != (load, turn):
                self._counted[key] = current
                heapq.heapreplace(heap, (current[0], current[1], key))
            elif key in without:
                skipped.append(heapq.heappop(heap))
            else:
                found = key
                break
        for entry in skipped:
            heapq.heappush(heap, entry)
        return found
