"""simulation.png: how full the pools were, and how many rollouts were finished, over virtual time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prorl_hpc.bench.simulation import SimulationResult
from prorl_hpc.bench.simulation_gauges import Place

_COLORS = ("#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756", "#9d9da1")


def draw_simulation(results: dict[str, SimulationResult], path: Path) -> None:
    """One result: all its pools. Several: their RUN slots at work, in one diagram. Draws on Agg directly."""
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    use, finished = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    first = next(iter(results.values()))
    config = first.config
    figure.suptitle(f"{config.nodes:,} nodes × {config.slots} slots, {config.servers} LLM servers (simulated)")
    if len(results) == 1:
        _draw_pools(use, first)
    for (name, result), color in zip(results.items(), _COLORS, strict=False):
        at_s = [0.0, *result.course.at_s]
        if len(results) > 1:
            _draw_share(use, result, Place.RUN, config.nodes * config.slots, name, color)
        finished.plot(at_s, [0, *result.course.finished], label=name, color=color)
    use.set_ylabel("in use, %" if len(results) == 1 else "RUN slots at work, %")
    use.set_ylim(0, 103)
    use.legend(loc="best", frameon=False, fontsize="small")
    finished.set_ylabel("rollouts finished")
    finished.set_xlabel("virtual time, s")
    if len(results) > 1:
        finished.legend(loc="best", frameon=False, fontsize="small")
    for axes in (use, finished):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")


def _draw_pools(axes: Axes, result: SimulationResult) -> None:
    places = {"init": Place.INIT, "ready": Place.READY, "run": Place.RUN, "eval": Place.EVAL, "servers": Place.SERVED}
    slots = result.config.nodes * result.config.slots
    for (name, place), color in zip(places.items(), _COLORS, strict=False):
        pool = next((pool for pool in result.pools if pool.name == name), None)
        # In a coupled pool every stage takes of the same slots; servers without a limit are never full.
        size = None if pool is None else pool.size or (None if name == "servers" else slots)
        if size:
            _draw_share(axes, result, place, size, name, color)


def _draw_share(axes: Axes, result: SimulationResult, place: Place, size: float, label: str, color: str) -> None:
    shares = [100 * number / size for number in result.course.mean[place]]
    axes.plot(result.course.at_s, shares, label=label, color=color, linewidth=1.2)
