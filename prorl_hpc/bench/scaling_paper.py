"""The seed's published figures (ProRL Agent, arXiv 2603.18815) beside ours, and what differs in the set-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from prorl_hpc.bench.ablation_parts import Ablation, Measure, Variant
from prorl_hpc.bench.ablation_table import ABLATIONS
from prorl_hpc.bench.scaling_figures import base_of, efficiency, of_nodes, steady
from prorl_hpc.bench.scaling_records import PointResult, PointState
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
    """Each other side of each ablation against ours, beside what the paper has; empty if none was run."""
    rows = []
    for ablation in ABLATIONS.values():
        mine = [result for result in results if result.spec.series == ablation.name]
        for nodes in sorted({result.spec.nodes for result in mine}):
            found = {result.spec.variant: result for result in mine if result.spec.nodes == nodes}
            ours, *others = ablation.variants
            rows += [
                _ablation_row(ablation, measure, (ours, found.get(ours.name)), (other, found.get(other.name)), nodes)
                for other in others
                for measure in ablation.measures
            ]
    head = ("ablation", "figure", "nodes", "ours", "the other side", "gain", "engine busy", "the paper",
            "what differs in the set-up")  # fmt: skip
    return markdown_table(head, rows) if rows else ""


Side: TypeAlias = tuple[Variant, PointResult | None]


def _ablation_row(ablation: Ablation, measure: Measure, ours: Side, other: Side, nodes: int) -> tuple[str, ...]:
    values = [_value(measure, point) for _, point in (ours, other)]
    gain = None if values[0] is None or values[1] is None else measure.gain(values[0], values[1])
    busy = [point.figures.engine_busy if point and point.figures else None for _, point in (ours, other)]
    compared = measure.against in ("", other[0].name)
    return (
        ablation.name,
        measure.name,
        f"{nodes}",
        _side(measure, ours, values[0]),
        _side(measure, other, values[1]),
        _gain_words(measure, gain),
        " against ".join(NONE if share is None else f"{100 * share:.0f} %" for share in busy),
        (measure.paper if compared else "") or NONE,
        ablation.differs,
    )


def _gain_words(measure: Measure, gain: float | None) -> str:
    if gain is None:
        return NONE
    if measure.points:
        return f"{gain:+.2f} points" if gain else "no difference"
    return f"{gain:.2f} ×"


def _value(measure: Measure, point: PointResult | None) -> float | None:
    if point is None or point.state is not PointState.DONE or point.figures is None:
        return None
    return measure.of(point.figures)


def _side(measure: Measure, side: Side, value: float | None) -> str:
    variant, point = side
    if value is not None:
        return f"{variant.words}: {measure.words(value)}"
    return f"{variant.words}: {'**not measured**' if point is None else _no_value(point)}"


def _no_value(point: PointResult) -> str:
    return "**no rate**" if point.state is PointState.DONE else f"**{point.state.value.replace('_', ' ')}**"


def differences() -> str:
    """What differs in the set-up, as a list."""
    return "\n".join(f"- **{what}**: {text}." for what, text in DIFFERENCES.items())
