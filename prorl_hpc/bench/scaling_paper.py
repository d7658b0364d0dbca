"""The seed's published figures (ProRL Agent, arXiv 2603.18815) beside ours, and what differs in the set-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorl_hpc.bench.scaling_figures import base_of, efficiency, of_nodes, steady
from prorl_hpc.bench.scaling_records import PointFigures, PointResult, PointState
from prorl_hpc.bench.scaling_tables import NONE, markdown_table

RATES = {1: 0.25, 2: 0.47, 4: 0.78, 8: 1.26}
"""Instances/s by nodes, 14B; read off its chart of throughput, so good to about 0.02."""
EFFICIENCY = {nodes: rate / nodes / RATES[1] for nodes, rate in RATES.items()}

DIFFERENCES = {
    "model and engine": "theirs: a 14B model on 8 GPUs (ablations), real inference; ours: the engine named at the top",
    "work": "theirs: SWE-Bench-like repositories in containers; ours: the workload named at the top, whose tool calls "
    "are real processes that sleep",
    "scale": "theirs: whole nodes with GPUs; ours: the place named at the top, on which several nodes may share a machine",
    "what was not run": "theirs: 15 CPU nodes beside 4 GPU nodes, 28 → 11 minutes a step, which needs GPU nodes",
    "their figures": "from their tables, the rates by nodes read off a chart; none was measured again here",
    "what can be compared": "the ratios between the two sides of an ablation, and efficiency; not rollouts/s",
}


def _rate(figures: PointFigures) -> float | None:
    return figures.steady_per_s or None


def _turns(figures: PointFigures) -> float | None:
    return figures.turns_per_s or None


def _batch(figures: PointFigures) -> float | None:
    return statistics.fmean(figures.batch_s) if figures.batch_s else None


@dataclass(frozen=True)
class Published:
    """One ablation. ``pair``: what the seed published with and without it; ``gpu_use``: its GPU use with and without,
    percent. ``ours``: our value of a point, of which less is better where ``less``."""

    question: str
    pair: tuple[float, float] | None
    unit: str
    source: str
    ours: Callable[[PointFigures], float | None]
    our_unit: str
    gpu_use: tuple[int, int] | None = None
    less: bool = False

    def gain(self, with_it: float | None, without: float | None) -> str:
        """How many times as good it is with it."""
        if not with_it or not without:
            return NONE
        return f"{without / with_it if self.less else with_it / without:.2f} ×"


_TABLE = "Table 3"
PUBLISHED = {
    "balancing": Published("load balancing", (0.37, 0.25), "instances/s", _TABLE, _turns, "turns/s", (78, 42)),
    "shell": Published("shell without tmux", (0.37, 0.29), "instances/s", _TABLE, _rate, "rollouts/s", (78, 68)),
    "cleanup": Published("stale-job clean-up", (0.37, 0.30), "instances/s", _TABLE, _rate, "rollouts/s", (78, 65)),
    "pools": Published("three pools, not one", None, "", "not published", _rate, "rollouts/s"),
    "batch": Published("asynchronous refill", (28, 80), "minutes a step", "its blog", _batch, "s a batch", less=True),
    "ready": Published("READY buffer", None, "", "it has none", _rate, "rollouts/s"),
}


def nodes_table(results: Sequence[PointResult]) -> str:
    """Efficiency by nodes, theirs and ours; empty if there is no such series."""
    points, base = of_nodes(results), base_of(results)
    if not points:
        return ""
    rows = []
    for point in points:
        nodes, ours = point.spec.nodes, efficiency(point, base)
        rate = steady(point)
        theirs = f"{RATES[nodes]:g} instances/s" if nodes in RATES else NONE
        rows.append((
            f"{nodes:,}", theirs, f"{EFFICIENCY[nodes]:.2f}" if nodes in EFFICIENCY else NONE,
            NONE if rate is None else f"{rate:.4g} rollouts/s", _no_value(point) if ours is None else f"{ours:.3f}",
        ))  # fmt: skip
    return markdown_table(("nodes", "theirs", "their efficiency", "ours", "our efficiency"), rows)


def ablations_table(results: Sequence[PointResult]) -> str:
    """Each other side of each ablation against ours, beside the published pair; empty if none was run."""
    rows = []
    for name, published in PUBLISHED.items():
        points = [result for result in results if result.spec.series == name]
        if not points:
            continue
        ours, *others = points  # ours first, as they were planned
        for other in others:
            rows.append((name, published.question, *_sides(published, ours, other), *_theirs(published)))
    head = ("ablation", "what is switched", "ours", "the other side", "gain", "engine busy", "theirs", "their gain",
            "their GPU use", "source")  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def _sides(published: Published, ours: PointResult, other: PointResult) -> tuple[str, ...]:
    with_it, without = _value(published, ours), _value(published, other)
    busy = [figures.engine_busy if (figures := side.figures) else None for side in (ours, other)]
    return (
        _side(published, ours, with_it),
        _side(published, other, without),
        published.gain(with_it, without),
        " against ".join(NONE if share is None else f"{100 * share:.0f} %" for share in busy),
    )


def _value(published: Published, point: PointResult) -> float | None:
    return published.ours(point.figures) if point.state is PointState.DONE and point.figures else None


def _side(published: Published, point: PointResult, value: float | None) -> str:
    what = f"{point.spec.variant}, {point.spec.nodes} node{'s' if point.spec.nodes > 1 else ''}"
    if value is None:
        return f"{what}: {_no_value(point)}"
    return f"{what}: {value:.4g} {published.our_unit}"


def _no_value(point: PointResult) -> str:
    return "**no rate**" if point.state is PointState.DONE else f"**{point.state.value.replace('_', ' ')}**"


def _theirs(published: Published) -> tuple[str, ...]:
    use = published.gpu_use
    gpu = f"{use[0]} % against {use[1]} %" if use else NONE
    if published.pair is None:
        return NONE, NONE, gpu, published.source
    with_it, without = published.pair
    return f"{with_it:g} against {without:g} {published.unit}", published.gain(with_it, without), gpu, published.source


def differences() -> str:
    """What differs in the set-up, as a list."""
    return "\n".join(f"- **{what}**: {text}." for what, text in DIFFERENCES.items())
