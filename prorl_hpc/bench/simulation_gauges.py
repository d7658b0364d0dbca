"""How many rollouts are where, integrated over virtual time exactly."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

KEPT_POINTS = 800
"""Points of a course at most; when there are more every second one is dropped."""


class Place(enum.IntEnum):
    """Where a rollout is, and SERVED: requests that an LLM server works on at full speed."""

    INIT = 0
    READY = 1
    RUN = 2
    RAN = 3
    EVAL = 4
    SERVED = 5


@dataclass(frozen=True)
class Course:
    """Over virtual time: ``at_s`` are edges; ``mean[place]`` is the mean number between an edge and the one before;
    ``finished`` counts rollouts that are done by the edge."""

    at_s: list[float]
    mean: list[list[float]]
    finished: list[int]


class Gauges:
    """``enter`` and ``leave`` are the hot path: two additions each. The integral of the number over (0, t) is the
    sum of the times of leaving less those of entering, and t for each that is still in."""

    def __init__(self) -> None:
        self.number = [0.0] * len(Place)
        self._sums = [0.0] * len(Place)
        self._points: list[tuple[float, list[float], int]] = [(0.0, [0.0] * len(Place), 0)]
        self._step_s = 1e-3
        self.next_point_s = 0.0

    def enter(self, place: int, now: float) -> None:
        self.number[place] += 1
        self._sums[place] -= now

    def leave(self, place: int, now: float) -> None:
        self.number[place] -= 1
        self._sums[place] += now

    def move(self, before: int, after: int, now: float) -> None:
        number, sums = self.number, self._sums
        number[before] -= 1
        sums[before] += now
        number[after] += 1
        sums[after] -= now

    def add(self, place: int, number: float, now: float) -> None:
        """``number`` more, or fewer if it is negative."""
        if number:
            self.number[place] += number
            self._sums[place] -= number * now

    def areas(self, now: float) -> list[float]:
        """Integrals from 0 to ``now``, by Place."""
        return [total + number * now for total, number in zip(self._sums, self.number, strict=True)]

    def note(self, now: float, finished: int) -> None:
        """Add a point to the course; due at ``next_point_s``, before the gauges change at ``now``."""
        if self._points[-1][0] == now:
            self._points.pop()
        self._points.append((now, self.areas(now), finished))
        if len(self._points) > KEPT_POINTS:
            self._points = self._points[::2]
            self._step_s = 2 * max(self._step_s, now / KEPT_POINTS)
        self.next_point_s = now + self._step_s

    def course(self) -> Course:
        pairs = list(itertools.pairwise(self._points))
        mean = [[(b[1][place] - a[1][place]) / (b[0] - a[0]) for a, b in pairs] for place in range(len(Place))]
        return Course([b[0] for _, b in pairs], mean, [b[2] for _, b in pairs])
