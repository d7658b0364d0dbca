"""Rates and efficiency of a series' points, and the figures that are held against goals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.scaling_records import PointResult, PointSpec, PointState
from prorl_hpc.bench.scaling_simulated import ALLOWED_ERROR, SimulatedSeries

NODES = "nodes"
"""The series that differs by nodes alone."""
EFFICIENCY_GOAL = 0.95
LARGE_ERROR = 0.05
"""Relative standard error of a rate or an efficiency beyond which too few rollouts were measured."""
_ABOVE_IDEAL = 1.05


def of_nodes(results: Sequence[PointResult]) -> list[PointResult]:
    """The points of the scaling series, by nodes, whatever became of them."""
    return sorted((result for result in results if result.spec.series == NODES), key=lambda result: result.spec.nodes)


def steady(result: PointResult) -> float | None:
    """Rollouts/s of a point; None if it has none: it failed, or too few rollouts were done for a steady rate."""
    if result.state is not PointState.DONE or result.figures is None or result.figures.steady_per_s <= 0:
        return None
    return result.figures.steady_per_s


def why_no_rate(result: PointResult) -> str:
    """In words; empty if the point has a rate."""
    if result.state is not PointState.DONE or result.figures is None:
        return f"{result.state.value.replace('_', ' ')}: {result.why or 'no reason was recorded'}"
    if steady(result) is None:
        return f"{result.figures.done} rollouts were done, too few for a steady rate: order more (load.rollouts)"
    return ""


def disturbances(result: PointResult) -> list[str]:
    """What makes the figures of a point that is done other than they seem, each in words without a full stop."""
    figures, found = result.figures, []
    if figures is not None and figures.restarts:
        counts = (f"{name} {_times(count)}" for name, count in sorted(figures.restarts.items()))
        found.append(f"died and started again: {', '.join(counts)}; the time lost so is in its rate")
    if figures is not None and figures.short_turns:
        found.append(
            f"{_count(figures.short_turns, 'turn')} had fewer tokens than the workload's row wants: cut at "
            "model.max_context_tokens, or ended by the engine"
        )
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def base_of(results: Sequence[PointResult]) -> PointResult | None:
    """The smallest measured point, which efficiency refers to."""
    return next((result for result in of_nodes(results) if steady(result)), None)


def efficiency(result: PointResult, base: PointResult | None) -> float | None:
    """Rate per node against that of ``base``."""
    rate, least = steady(result), base and steady(base)
    if rate is None or base is None or not least:
        return None
    return (rate / result.spec.nodes) / (least / base.spec.nodes)


def cautions(result: PointResult) -> list[str]:
    """``disturbances``, after what its number of rollouts makes of its rate. Batches are not measured by their rate."""
    error = steady_error(result)
    if error is None or error <= LARGE_ERROR or result.spec.load.batches:
        return disturbances(result)
    more = ": order more (rollouts=)" if result.spec.series == NODES else ""
    return [
        f"its rate is known to {spread(error)} only (standard error), too few rollouts{more}",
        *disturbances(result),
    ]


def steady_error(result: PointResult | None) -> float | None:
    """Relative standard error of its steady rate; None where there is none."""
    return None if result is None or steady(result) is None or result.figures is None else result.figures.steady_error


def efficiency_error(result: PointResult, base: PointResult | None) -> float | None:
    """Relative standard error of ``efficiency``; None where it is not known, and for the point that it refers to."""
    errors = steady_error(result), steady_error(base)
    if result is base or errors[0] is None or errors[1] is None:
        return None
    return math.hypot(errors[0], errors[1])


def spread(error: float | None) -> str:
    """Of a relative standard error, in words; empty if it is not known."""
    return "" if error is None else f"± {100 * error:.2g} %"


def uncertain(result: PointResult, base: PointResult | None) -> str:
    """Why the efficiency of a point is not to be relied on, and what to do; empty if it is."""
    reached, error = efficiency(result, base), efficiency_error(result, base)
    if reached is None or result is base:
        return ""
    if error is not None and error > LARGE_ERROR:
        return f"known to {spread(error)} only (standard error), too few rollouts: order more (rollouts=)"
    if reached > _ABOVE_IDEAL:
        return (
            f"above {_ABOVE_IDEAL:g}, which more nodes alone do not give: most likely too few rollouts, order more "
            "(rollouts=)"
        )
    return ""


def commits(results: Sequence[PointResult]) -> dict[str, list[str]]:
    """The names of the points by the commit that they were measured at, where it is known."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.commit:
            found.setdefault(result.commit, []).append(result.spec.name)
    return found


def series_figures(
    planned: Sequence[PointSpec],
    results: Sequence[PointResult],
    simulated: SimulatedSeries | None,
    not_simulated: str = "",
) -> list[Figure]:
    """Of the scaling series; the largest point has the goal. Points that were planned but have no result are told.
    ``not_simulated``: why there is no simulation, though it was asked for."""
    found = {result.spec.name: result for result in results}
    base, figures = base_of(results), []
    specs = sorted((spec for spec in planned if spec.series == NODES), key=lambda spec: spec.nodes)
    for spec in specs:
        figures += _of_point(spec, found.get(spec.name), base, is_last=spec is specs[-1])
    if simulated is not None:
        figures += _of_simulation(simulated)
    if not_simulated:
        figures.append(Figure.not_taken("simulated efficiency", "×", "", f">= {EFFICIENCY_GOAL:g}", not_simulated))
    return figures


def _of_point(spec: PointSpec, result: PointResult | None, base: PointResult | None, *, is_last: bool) -> list[Figure]:
    rate_name, name = f"rate at {node_words(spec.nodes)}", f"efficiency at {node_words(spec.nodes)}"
    against = f"{node_words(base.spec.nodes)}" if base else "the smallest point"
    goal = f">= {EFFICIENCY_GOAL:g}" if is_last else ""
    rate = steady(result) if result else None
    if rate is None:
        why = why_no_rate(result) if result else "not measured yet: the same command goes on with the series"
        figures = [Figure.not_taken(rate_name, "rollouts/s", "", "", why)]
        return [*figures, Figure.not_taken(name, "×", against, goal, why)] if is_last and base else figures
    assert result is not None and result.figures is not None
    disturbed = "".join(f"; {words}" for words in disturbances(result))
    told = Figure.told(rate_name, rate, "rollouts/s", "", "; ".join([_counts(result), *cautions(result)]))
    reached = efficiency(result, base)
    if reached is None or base is None or result is base:
        return [told]
    doubt = uncertain(result, base)
    known = doubt or spread(efficiency_error(result, base))
    detail = f"{known}; " if known else ""
    detail += f"rate per node; {rate:.4g} rollouts/s at {node_words(spec.nodes)}{disturbed}"
    if mind := disturbances(base):
        detail += f"; at {against}: {'; '.join(mind)}"
    if is_last:
        return [told, Figure.at_least(name, reached, EFFICIENCY_GOAL, "×", against, detail)]
    return [told, Figure.told(name, reached, "×", against, detail)]


def _of_simulation(simulated: SimulatedSeries) -> list[Figure]:
    worst = max(simulated.checks, key=lambda check: abs(check.error))
    figures = [
        Figure.at_most(
            "largest error of a foretold rate",
            100 * abs(worst.error),
            100 * ALLOWED_ERROR,
            "%",
            "measured points",
            f"at {node_words(worst.nodes)}: {worst.foretold_per_s:.4g} foretold, {worst.measured_per_s:.4g} measured",
        )
    ]
    if not simulated.points:
        return figures
    last = max(simulated.points, key=lambda point: point.nodes)
    name, against = (
        f"simulated efficiency at {node_words(last.nodes)}",
        f"{node_words(simulated.base_nodes)}, simulated",
    )
    if not simulated.valid:
        return [*figures, Figure.not_taken(name, "×", against, f">= {EFFICIENCY_GOAL:g}", simulated.why)]
    detail = simulated.conclusion
    if last.efficiency >= EFFICIENCY_GOAL:
        return [*figures, Figure.at_least(name, last.efficiency, EFFICIENCY_GOAL, "×", against, detail)]
    # The goal is this efficiency or the name of what saturates, which the conclusion gives.
    return [*figures, Figure(name, last.efficiency, "×", against, f">= {EFFICIENCY_GOAL:g} or named", True, detail)]


def _counts(result: PointResult) -> str:
    figures, error = result.figures, spread(steady_error(result))
    assert figures is not None
    known = f" ({error}, standard error)" if error else ""
    return f"steady rate{known} of {figures.done} rollouts done, {figures.not_done} not done, {figures.seconds:.0f} s in all"


def node_words(count: int) -> str:
    return _count(count, "node")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
