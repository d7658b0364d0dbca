"""What is to be looked at, and when."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T", str, tuple[str, str])


class Deadlines(Generic[T]):
    """Times with what they are about. Nothing is taken back: whoever looks sees whether it still matters.
    What is due at infinity is not kept."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, T]] = []

    def add(self, time: float, about: T) -> None:
        if time < math.inf:
            heapq.heappush(self._heap, (time, about))

    def due(self, now: float) -> Iterator[tuple[float, T]]:
        """Take out all whose time has come, the earliest first."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)
