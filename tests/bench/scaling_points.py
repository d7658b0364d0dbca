"""Points of a series, made up."""

from __future__ import annotations

from dataclasses import dataclass, field

from prorl_hpc.bench.scaling_records import (
    LoadOrder,
    PointFigures,
    PointResult,
    PointSpec,
    PointState,
    Series,
    Times,
)

SCRIPTED = "scripted: first token 0.05 s, 40 tokens/s"


@dataclass
class Shape:
    """Of a made-up point."""

    per_node: float = 0.1
    coordinator_s: float | None = 0.004
    batch_s: tuple[float, ...] = ()
    trainer_busy: float | None = None
    run_dir: str = "/nowhere"
    restarts: dict[str, int] = field(default_factory=dict)
    short_turns: int = 0
    utilisation: dict[str, float] = field(default_factory=lambda: {"init": 0.3, "ready": 0.6, "run": 0.97, "eval": 0.4})


def spec(nodes: int, series: str = "nodes", variant: str = "", rollouts: int = 30) -> PointSpec:
    name = f"{series}-{variant}-{nodes}" if variant else f"{series}-{nodes}"
    return PointSpec(name, nodes, [f"nodes={nodes}"], LoadOrder(rollouts=rollouts * nodes), series, variant)


def done(point: PointSpec, shape: Shape | None = None) -> PointResult:
    shape = shape or Shape()
    figures = PointFigures(
        done=point.load.rollouts,
        not_done=0,
        seconds=400.0,
        per_s=0.8 * shape.per_node * point.nodes,
        steady_per_s=shape.per_node * point.nodes,
        utilisation=shape.utilisation,
        waits={"init": Times(90.0, 80.0, 200.0), "run": Times(4.0, 3.5, 9.0), "eval": Times(0.02, 0.01, 0.3)},
        stages={"init": Times(1.0, 1.0, 1.2), "run": Times(40.0, 38.0, 70.0), "eval": Times(3.0, 2.9, 5.0)},
        turns_per_s=1.2 * point.nodes,
        generated_tokens_per_s=90.0 * point.nodes,
        tool_call_s=0.004,
        batch_s=list(shape.batch_s),
        engine_busy=0.7,
        engine_requests=1.8,
        trainer_busy=shape.trainer_busy,
        coordinator_s=shape.coordinator_s,
        restarts=shape.restarts,
        short_turns=shape.short_turns,
    )
    return PointResult(point, PointState.DONE, "", shape.run_dir, SCRIPTED, "swe-like", "2026-05-01T10:00:00", figures)


def failed(point: PointSpec, state: PointState = PointState.FAILED, why: str = "its worker ended") -> PointResult:
    return PointResult(point, state, why, "/nowhere", SCRIPTED, "swe-like", "2026-05-01T10:00:00", None)


def series_of(*results: PointResult) -> Series:
    return Series(["bench", "scaling", "nodes=1,2,4,8"], "local", [result.spec for result in results])
