"""Bars by point: use of the pools, waits, batches, engine and trainer. A point that failed keeps its place, and says so."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from prorl_hpc.bench.scaling_figures import of_nodes
from prorl_hpc.bench.scaling_records import PointFigures, PointResult, PointState

BAD = "#c0392b"
COLORS = {"init": "#4c78a8", "ready": "#9ecae9", "run": "#f58518", "eval": "#54a24b", "coupled": "#b279a2"}
_BUSY = {"engine": "#f58518", "trainer": "#4c78a8", "coordinator": "#7f7f7f"}
_STAGES = ("init", "run", "eval")
_LEAST_SCALE_S, _NO_WAIT_S = 1.0, 0.001
"""Of a diagram of waits: nobody shall take milliseconds for much."""
_ASIDE = 0.24
"""Width of the dots of a point, of 1 between points."""
Value = Callable[[PointFigures], float | None]


def draw_utilisation(results: Sequence[PointResult]) -> Figure | None:
    """None if no point of the series was measured."""
    pools: dict[str, Value] = {pool: lambda figures, pool=pool: figures.utilisation.get(pool) for pool in COLORS}  # type: ignore[misc]
    names = {"init": "INIT", "ready": "READY (fill)", "run": "RUN", "eval": "EVAL", "coupled": "held (coupled)"}
    return _shares(of_nodes(results), pools, names, COLORS, "in use, %")


def draw_busy(results: Sequence[PointResult]) -> Figure | None:
    """Engine: share of moments with a request; trainer: of the run's time; coordinator: of one CPU."""
    parts: dict[str, Value] = {
        "engine": lambda figures: figures.engine_busy,
        "trainer": lambda figures: figures.trainer_busy,
        "coordinator": lambda figures: None if figures.coordinator_s is None else figures.coordinator_s * figures.per_s,
    }
    names = {"engine": "LLM servers", "trainer": "trainer", "coordinator": "coordinator (of one CPU)"}
    return _shares(of_nodes(results), parts, names, _BUSY, "busy, %")


def _shares(
    points: Sequence[PointResult], values: dict[str, Value], names: dict[str, str], colors: dict[str, str], label: str
) -> Figure | None:
    if not any(_value(point, value) is not None for point in points for value in values.values()):
        return None
    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    shown = {name: value for name, value in values.items() if any(_value(p, value) is not None for p in points)}
    width = 0.8 / len(shown)
    for number, (name, value) in enumerate(shown.items()):
        places, heights = [], []
        for place, point in enumerate(points):
            if (share := _value(point, value)) is not None:
                places.append(place + (number - (len(shown) - 1) / 2) * width)
                heights.append(100 * share)
        bars = axes.bar(places, heights, 0.92 * width, color=colors[name], label=names[name])
        axes.bar_label(bars, fmt=_percent_label, fontsize="x-small", padding=1)
    axes.set_ylim(0, max(108.0, axes.get_ylim()[1]))
    axes.set_ylabel(label)
    _point_axis(axes, points)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown), frameon=False, fontsize="small")
    return figure


def draw_waits(results: Sequence[PointResult]) -> Figure | None:
    """A diagram for each stage, each with its own scale from 0, for they differ by orders of magnitude: so the means stand
    as numbers on the bars."""
    points = of_nodes(results)
    if not any(point.figures and point.figures.waits for point in points):
        return None
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    for axes, stage in zip(figure.subplots(1, len(_STAGES)), _STAGES, strict=True):
        known = [(place, point.figures.waits[stage]) for place, point in enumerate(points)
                 if point.figures and stage in point.figures.waits]  # fmt: skip
        places = [place for place, _ in known]
        longest = max((max(waits.p99, waits.mean) for _, waits in known), default=0.0)
        top = max(1.15 * longest, _LEAST_SCALE_S)
        bars = axes.bar(places, [waits.mean for _, waits in known], 0.6, color=COLORS[stage])
        axes.bar_label(bars, [_seconds_label(waits.mean) for _, waits in known], fontsize="small", padding=2, zorder=4,
                       bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5})  # fmt: skip
        axes.plot(places, [waits.p99 for _, waits in known], "_", color="black", markersize=18)
        if longest < _NO_WAIT_S:
            axes.text(0.5, 0.5, "no wait", transform=axes.transAxes, ha="center", va="center", color="#555555")
        axes.set_title(f"before {stage.upper()}: scale to {top:.3g} s", fontsize="medium")
        axes.set_ylabel("waited, s")
        axes.set_ylim(0, top)
        _point_axis(axes, points)
    kinds = [Patch(color="#9d9da1", label="mean, in seconds on the bar"),
             Line2D([], [], color="black", label="99th percentile; each diagram has its own scale")]  # fmt: skip
    figure.legend(handles=kinds, loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_batches(results: Sequence[PointResult]) -> Figure | None:
    """Points that ordered batches, ablations too; None if there is none."""
    points = [result for result in results if result.spec.load.batches]
    if not any(point.figures and point.figures.batch_s for point in points):
        return None
    figure = Figure(figsize=(max(5.0, 2 + 1.3 * len(points)), 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    each = [(place, point.figures.batch_s) for place, point in enumerate(points) if point.figures]
    means = [(place, statistics.fmean(seconds)) for place, seconds in each if seconds]
    dots = [(place + _aside(n, len(seconds)), value) for place, seconds in each for n, value in enumerate(seconds)]
    axes.plot(*zip(*dots, strict=True), "o", color=COLORS["init"], alpha=0.6, label="a batch")
    axes.plot(*zip(*means, strict=True), "_", color="black", markersize=34, label="mean")
    for place, mean in means:
        axes.annotate(f"{mean:,.1f} s", (place, mean), xytext=(22, 0), textcoords="offset points", va="center",
                      fontsize="small")  # fmt: skip
    kinds = [Line2D([], [], marker="o", linestyle="", color=COLORS["init"], alpha=0.6, label="a batch"),
             Line2D([], [], color="black", label="mean")]  # fmt: skip
    axes.legend(handles=kinds, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small")
    axes.set_ylim(0, 1.08 * max(value for _, value in dots))
    axes.set_ylabel("time to a full batch, s")
    _point_axis(axes, points, by_name=True)
    return figure


def _aside(number: int, of: int) -> float:
    """Where one of several dots stands beside its place, so that those that are alike are seen: in their order."""
    return 0.0 if of == 1 else _ASIDE * (number / (of - 1) - 0.5)


def _seconds_label(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _percent_label(percent: float) -> str:
    """A little is not nothing."""
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"


def _value(point: PointResult, value: Value) -> float | None:
    return value(point.figures) if point.state is PointState.DONE and point.figures else None


def _point_axis(axes: Axes, points: Sequence[PointResult], *, by_name: bool = False) -> None:
    labels = [_named(point) if by_name else f"{point.spec.nodes:,}" for point in points]
    axes.set_xticks(range(len(points)), labels)
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.set_xlabel("" if by_name else "nodes")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    for place, point in enumerate(points):
        if point.state is not PointState.DONE:
            edge = axes.get_xaxis_transform()
            axes.plot([place], [0.03], "X", color=BAD, transform=edge, clip_on=False)
            axes.annotate(point.state.value.replace("_", " "), (place, 0.03), xycoords=edge, xytext=(0, 8),
                          textcoords="offset points", ha="center", color=BAD, fontsize="small")  # fmt: skip


def _named(point: PointResult) -> str:
    spec = point.spec
    return f"{spec.series}\n{spec.variant or 'ours'}\n{spec.nodes} node{'s' if spec.nodes > 1 else ''}"
