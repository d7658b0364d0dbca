"""The plots of a series, PNG and SVG: rates and efficiency against nodes here, bars by point in scaling_bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from prorl_hpc.bench.scaling_bars import BAD, draw_batches, draw_busy, draw_utilisation, draw_waits
from prorl_hpc.bench.scaling_figures import (
    EFFICIENCY_GOAL,
    base_of,
    efficiency,
    efficiency_error,
    of_nodes,
    steady,
    steady_error,
)
from prorl_hpc.bench.scaling_paper import EFFICIENCY as PAPER_EFFICIENCY
from prorl_hpc.bench.scaling_records import PointResult, PointState
from prorl_hpc.bench.scaling_simulated import SimulatedPoint, SimulatedSeries

MEASURED, SIMULATED, IDEAL, PAPER = "#1f5fa8", "#d9822b", "#555555", "#8a8a8a"
_LINEAR_UP_TO = 16
"""Nodes; beyond it both axes are logarithmic, with the ideal still a straight line."""
CAPTIONS = {
    "scaling": "Rollouts per second (steady) and efficiency against nodes, with their standard errors",
    "utilisation": "How full each pool was, while the rate was steady",
    "waits": "Time waited for each stage: mean (bar) and 99th percentile (dash)",
    "batches": "Time from a batch's order to the full batch: each batch (dot) and the mean (dash)",
    "busy": "Busy share of engine, trainer and coordinator",
}


def draw_plots(folder: Path, results: Sequence[PointResult], simulated: SimulatedSeries | None) -> dict[str, str]:
    """Write ``folder``/NAME.png and .svg of every plot that has something to show; those that have not are not
    written, and taken away if they were. Returns their captions by name."""
    folder.mkdir(exist_ok=True)
    draw: dict[str, Callable[[], Figure | None]] = {
        "scaling": lambda: draw_scaling(results, simulated),
        "utilisation": lambda: draw_utilisation(results),
        "waits": lambda: draw_waits(results),
        "batches": lambda: draw_batches(results),
        "busy": lambda: draw_busy(results),
    }
    drawn = {}
    for name, caption in CAPTIONS.items():
        figure = draw[name]()
        if figure is None:
            for kind in ("png", "svg"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        else:
            _save(figure, folder / name)
            drawn[name] = caption
    return drawn


def _save(figure: Figure, stem: Path) -> None:
    """Text stays text in the SVG, and the same plot gives the same file."""
    FigureCanvasAgg(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "prorl_hpc"}):
        for kind, metadata in (("png", None), ("svg", {"Date": None})):
            path = stem.with_suffix(f".{kind}")
            part = path.with_suffix(f".{kind}.part")
            figure.savefig(part, format=kind, metadata=metadata)
            part.replace(path)


def draw_scaling(results: Sequence[PointResult], simulated: SimulatedSeries | None) -> Figure | None:
    """Rate and efficiency; None if no point of the series ended."""
    points = of_nodes(results)
    if not points:
        return None
    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    rates, shares = figure.subplots(1, 2)
    sizes = sorted({point.spec.nodes for point in points} | {point.nodes for point in _continued(simulated)})
    if len(sizes) == 1:  # in the middle, with room for the lines that it is held against
        sizes.append(2 * sizes[0])
    for axes in (rates, shares):
        _node_axis(axes, sizes)
    _draw_rates(rates, points, simulated, sizes)
    _draw_efficiency(shares, points, simulated)
    engines = sorted({point.engine for point in points})
    workloads = sorted({point.workload for point in points})
    figure.suptitle(f"{', '.join(workloads)} · {'; '.join(engines)}", fontsize="medium", wrap=True)
    return figure


def _draw_rates(
    axes: Axes, points: Sequence[PointResult], simulated: SimulatedSeries | None, sizes: Sequence[int]
) -> None:
    base = base_of(points)
    if base is not None:
        per_node = (steady(base) or 0.0) / base.spec.nodes
        ideal = [(nodes, per_node * nodes) for nodes in (sizes[0], sizes[-1])]
        axes.plot(*_xy(ideal), "--", color=IDEAL, linewidth=1, label="ideal")
        rates = [(point.spec.nodes, steady(point)) for point in points]
        axes.plot(*_xy(rates), "o-", color=MEASURED, label="measured")
        _draw_errors(axes, rates, [steady_error(point) for point in points])
        _draw_simulated(axes, simulated, lambda point: point.per_s)
    if sizes[-1] > _LINEAR_UP_TO and base is not None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_log_ticks(axes)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    _mark_failed(axes, points)
    axes.set_ylabel("rollouts/s (steady)")
    axes.legend(loc="upper left", frameon=False, fontsize="small")


def _draw_efficiency(axes: Axes, points: Sequence[PointResult], simulated: SimulatedSeries | None) -> None:
    base = base_of(points)
    known = [(point.spec.nodes, efficiency(point, base)) for point in points]
    axes.axhline(1, linestyle="--", color=IDEAL, linewidth=1, label="ideal")
    axes.axhline(EFFICIENCY_GOAL, linestyle=":", color=IDEAL, linewidth=1, label=f"goal: {EFFICIENCY_GOAL:g}")
    if base is not None:
        axes.plot(*_xy(known), "o-", color=MEASURED, label="measured")
        _draw_errors(axes, known, [efficiency_error(point, base) for point in points])
        _draw_simulated(axes, simulated, lambda point: point.efficiency)
    least, most = axes.get_xlim()
    if paper := [(nodes, share) for nodes, share in PAPER_EFFICIENCY.items() if least <= nodes <= most]:
        axes.plot(
            *_xy(paper),
            "s-",
            color=PAPER,
            linewidth=1,
            markersize=4,
            zorder=1.5,
            label="ProRL Agent's chart (14B on GPUs)",
        )
    shown = [share * (1 + (efficiency_error(point, base) or 0.0))
             for point, (_, share) in zip(points, known, strict=True) if share]  # fmt: skip
    shown += [point.efficiency for point in _continued(simulated)]
    axes.set_ylim(0, max([1.1, *(1.05 * share for share in shown)]))
    _mark_failed(axes, points)
    axes.set_ylabel(
        "efficiency: rollouts/s per node, "
        + (f"{base.spec.nodes} node{'s' if base.spec.nodes > 1 else ''} = 1" if base else "smallest = 1")
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.07), frameon=False, fontsize="small")


def _log_ticks(axes: Axes) -> tuple[float, ...]:
    """Within a decade; more where there are few decades."""
    least, most = axes.get_ylim()
    return (1.0, 2.0, 5.0) if math.log10(most / least) < 4 else (1.0,)


def _draw_errors(axes: Axes, points: Sequence[tuple[int, float | None]], errors: Sequence[float | None]) -> None:
    """Bars of one standard error, where it is known."""
    known = [(x, y, y * error) for (x, y), error in zip(points, errors, strict=True) if y is not None and error]
    if known:
        x, y, off = zip(*known, strict=True)
        axes.errorbar(x, y, yerr=off, fmt="none", ecolor=MEASURED, elinewidth=1, capsize=3)


def _draw_simulated(axes: Axes, simulated: SimulatedSeries | None, of: Callable[[SimulatedPoint], float]) -> None:
    """Apart from what was measured: hollow, dotted, another colour; and named for what it is. No line joins the two: they
    have other numbers of rollouts, and each its own base."""
    points = _continued(simulated)
    if simulated is None or not points:
        return
    label = "simulated" if simulated.valid else "simulated, NOT VALID (see the report)"
    known = [(point.nodes, of(point)) for point in points]
    color = SIMULATED if simulated.valid else BAD
    axes.plot(*_xy(known), "D:", color=color, markerfacecolor="none", label=label)


def _mark_failed(axes: Axes, points: Sequence[PointResult]) -> None:
    """On the lower edge, for they have no rate."""
    edge = axes.get_xaxis_transform()
    without = [point for point in points if steady(point) is None]
    for number, point in enumerate(without):
        word = "no rate" if point.state is PointState.DONE else point.state.value.replace("_", " ")
        label = "without a rate" if not number else "_"
        axes.plot([point.spec.nodes], [0.02], "X", color=BAD, transform=edge, clip_on=False, zorder=5, label=label)
        axes.annotate(word, (point.spec.nodes, 0.02), xycoords=edge, xytext=(0, 8), textcoords="offset points",
                      ha="center", color=BAD, fontsize="small")  # fmt: skip


def _node_axis(axes: Axes, sizes: Sequence[int]) -> None:
    if sizes[-1] > _LINEAR_UP_TO:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
    else:
        axes.set_xlim(0, sizes[-1] * 1.08)
    ticks = sorted({*sizes, *(nodes for nodes in PAPER_EFFICIENCY if sizes[0] <= nodes <= sizes[-1])})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if len(ticks) > 8:
        axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("nodes")
    axes.grid(alpha=0.3)


def _continued(simulated: SimulatedSeries | None) -> list[SimulatedPoint]:
    return sorted(simulated.points, key=lambda point: point.nodes) if simulated else []


def _xy(points: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    """The line breaks where there is no value: nothing is drawn across a point that failed."""
    return [x for x, _ in points], [math.nan if y is None else y for _, y in points]
