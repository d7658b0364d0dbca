"""The rate of a system that is full: without the time in which it fills up and runs dry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def steady_rate(ended_s: Sequence[float], run_began_s: Sequence[float]) -> tuple[float, float, float] | None:
    """(from, to, rollouts per second between). ``ended_s``: when each rollout that is done ended, sorted; ``run_began_s``:
    when each began its RUN, in any order.

    From the end of the first tenth to the end of the last, or to the last start of a RUN if that comes before: from
    then on slots are empty, and how long the rest takes says how long the slowest rollouts are, not how fast the system
    is. None for fewer than three rollouts, and where there is no such time: they are too few to fill the system.
    """
    ended: NDArray[np.float64] = np.asarray(ended_s, dtype=np.float64)
    tenth = len(ended) // 10
    if len(ended) < 3:
        return None
    first, last = float(ended[tenth]), min(float(ended[-1 - tenth]), float(np.max(run_began_s)))
    count = int(np.searchsorted(ended, last, "right") - np.searchsorted(ended, first, "right"))
    if last <= first or count < 1:
        return None
    return first, last, count / (last - first)
