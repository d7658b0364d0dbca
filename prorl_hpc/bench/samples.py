"""Times of one kind of call, and how those of two sides compare."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from prorl_hpc.bench.figures import Figure
from prorl_hpc.messages.errors import RunError

Side = Callable[[int], Awaitable[Sequence[float]]]
"""Makes so many calls and returns what each took, in seconds."""

P95_CALLS = 100
"""With fewer, a 95th percentile is one of the five slowest calls, or the slowest."""


class Samples:
    """Seconds; at least one."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._ordered = sorted(seconds)
        if not self._ordered:
            raise RunError("nothing was timed")

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        return self.quantile(0.95)

    @property
    def total(self) -> float:
        return math.fsum(self._ordered)

    def quantile(self, share: float) -> float:
        """The smallest time that at least ``share`` of all do not exceed."""
        return self._ordered[max(0, math.ceil(share * len(self._ordered)) - 1)]

    def __str__(self) -> str:
        return f"median {1000 * self.median:.3g} ms, p95 {1000 * self.p95:.3g} ms"


async def in_turns(calls: int, turn: int, *sides: Side) -> list[Samples]:
    """``calls`` of each side, ``turn`` at a time, the first side of a round being another one each time: what the
    machine does meanwhile meets all sides alike."""
    found: list[list[float]] = [[] for _ in sides]
    for round_number, start in enumerate(range(0, calls, turn)):
        for place in range(len(sides)):
            number = (round_number + place) % len(sides)
            found[number] += await sides[number](min(turn, calls - start))
    return [Samples(seconds) for seconds in found]


def ratio(name: str, ours: Samples, theirs: Samples, goal: float, against: str) -> list[Figure]:
    """Ours over theirs, by median and by 95th percentile; the goal is for both (see ``p95_if_enough``)."""
    return [
        Figure.at_most(f"{name}, median", ours.median / theirs.median, goal, "x", against, _both(ours, theirs)),
        p95_if_enough(Figure.at_most(f"{name}, p95", ours.p95 / theirs.p95, goal, "x", against), ours, theirs),
    ]


def p95_if_enough(figure: Figure, *sides: Samples) -> Figure:
    """The figure of a 95th percentile; told, not judged, where it stands on so few calls that one of them decides it."""
    fewest = min(map(len, sides))
    if fewest >= P95_CALLS or figure.value is None:
        return figure
    why = f"not judged: it takes {P95_CALLS} calls, here are {fewest}; the median decides"
    return Figure.told(figure.name, figure.value, figure.unit, figure.against, why)


def told_ratio(name: str, ours: Samples, theirs: Samples, against: str) -> list[Figure]:
    """The same without a goal, by median alone."""
    return [Figure.told(f"{name}, median", ours.median / theirs.median, "x", against, _both(ours, theirs))]


def _both(ours: Samples, theirs: Samples) -> str:
    return f"{len(ours)} calls: {ours}; {len(theirs)} of the other: {theirs}"
