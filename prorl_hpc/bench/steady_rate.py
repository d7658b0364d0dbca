"""The rate of a system that is full: without the time in which it fills up and runs dry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.messages.rollout import Stage, StageTiming

Spans = NDArray[np.float64]
"""When each rollout that is done began and ended INIT, RUN and EVAL, seconds: shape (rollouts, 6), in the order of ``span``."""


def span(ended_s: float, timings: Sequence[StageTiming]) -> tuple[float, ...]:
    """A row of Spans, counted back from the end; a stage without a timing took no time."""
    found = []
    by_stage = {timing.stage: timing for timing in timings}
    at = ended_s
    for stage in reversed(Stage):
        timing = by_stage.get(stage)
        began = at - (timing.busy_s if timing is not None else 0.0)
        found += [at, began]
        at = began - (timing.queued_s if timing is not None else 0.0)
    return tuple(reversed(found))


def steady_rate(spans: Spans, slots: Mapping[str, int], *, coupled: bool = False) -> tuple[float, float, float] | None:
    """(from, to, rollouts per second between). ``slots``: of each stage, over all nodes; ``coupled``: those of ``run`` are
    held from the beginning of INIT to the end of EVAL.

    From the end of the first tenth to the end of the last, or to the last start of a RUN if that comes before: from
    then on slots are empty, and how long the rest takes says how long the slowest rollouts are, not how fast the system
    is. The rate is that at which the fullest pool gets through rollouts, which all others follow: each counts by the share
    of its time there that lies between. Counting ends instead would give the same on average, but jumps by whole bunches
    where few rollouts are measured. None for fewer than three rollouts, and where there is no such time: they are too few to
    fill the system.
    """
    if (times := _steady_time(spans)) is None:
        return None
    first, last = times
    _, shares = _fullest(spans, slots, first, last, coupled=coupled)
    flow = float(shares.sum()) / (last - first)
    return (first, last, flow) if flow > 0 else None


def steady_error(spans: Spans, slots: Mapping[str, int], *, coupled: bool = False) -> float | None:
    """Relative standard error of ``steady_rate``: how far another order of the same rollouts would move it, for only some
    of them lie in its time. None where there is no such rate, or only one rollout in it.

    With as many slots in use, the rate is a ratio: rollouts to the seconds for which they held one. Its error is that of a
    ratio estimator from a part f of a finite population (Cochran, Sampling Techniques, chapter 6), here of all rollouts:
    √((1-f) · n/(n-1) · Σ(share - rate · held)²) / Σ share, which is √(1-f) · (standard deviation / mean) / √n of their
    times where all n lie wholly in the steady time. Not in it: other rows (all points of a series have the same), slots that
    stay empty, and a machine that is slower at times.
    """
    if (times := _steady_time(spans)) is None:
        return None
    within, shares = _fullest(spans, slots, *times, coupled=coupled)
    counted = int(np.count_nonzero(shares))
    if counted < 2 or within.sum() <= 0:
        return None
    off = shares - within * (shares.sum() / within.sum())
    outside = 1 - shares.sum() / len(spans)
    return float(np.sqrt(outside * counted / (counted - 1) * np.sum(off**2)) / shares.sum())


def _steady_time(spans: Spans) -> tuple[float, float] | None:
    if len(spans) < 3:
        return None
    ended = np.sort(spans[:, 5])
    tenth = len(ended) // 10
    first, last = float(ended[tenth]), min(float(ended[-1 - tenth]), float(spans[:, 2].max()))
    return (first, last) if last > first else None


def _fullest(
    spans: Spans, slots: Mapping[str, int], first: float, last: float, *, coupled: bool
) -> tuple[Spans, Spans]:
    """Of the pool with the greatest share of its slots in use between ``first`` and ``last``: of each rollout the seconds
    there that lie between, and their share of all its seconds there."""
    if coupled:
        held = [(spans[:, 0], spans[:, 5], slots["run"])]
    else:
        held = [(spans[:, 2 * i], spans[:, 2 * i + 1], slots.get(stage.value, 0)) for i, stage in enumerate(Stage)]
    pools = [(*_within(began, over, first, last), size) for began, over, size in held if size]
    if not pools:
        return np.zeros(len(spans)), np.zeros(len(spans))
    within, shares, _ = max(pools, key=lambda pool: (pool[0].sum() / pool[2], pool[1].sum()))
    return within, shares


def _within(began: Spans, ended: Spans, first: float, last: float) -> tuple[Spans, Spans]:
    within = np.clip(np.minimum(ended, last) - np.maximum(began, first), 0.0, None)
    busy = ended - began
    at_once = (first < ended) & (ended <= last)
    return within, np.divide(within, busy, out=at_once.astype(np.float64), where=busy > 0)
