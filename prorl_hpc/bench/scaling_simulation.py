"""Continues a measured series by simulation: fitted from the points' recorded stage times, held against each of them.

The simulator runs the service's own scheduler. What it is given is the order of the dataset rows and, for each rollout,
the three stage times that one of the same row took. A measured point is foretold from the rollouts of the *other* points,
so that none of its times is in what foretells it; the continuation uses all.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prorl_hpc.bench.scaling_figures import EFFICIENCY_GOAL, node_words, of_nodes, steady
from prorl_hpc.bench.scaling_records import RECORD_FILE, LoadRecord, PointResult, Times
from prorl_hpc.bench.scaling_simulated import ALLOWED_ERROR, Check, Coordinator, SimulatedPoint, SimulatedSeries
from prorl_hpc.bench.simulation import SimulationResult, simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_times import Floats
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Stage, Status
from prorl_hpc.observe.rollout_store import read_rollouts

_SATURATED = 0.9
_FEW_WAVES = 8
"""Rollouts a RUN slot, below which the middle 80 % still has much of filling up and running dry in it."""


@dataclass(frozen=True)
class Recorded:
    """A measured point with what the simulator needs of its run. ``rate``: rollouts/s; ``rows``: the dataset rows in the
    order of the load; ``times``: seconds of INIT, RUN and EVAL of each, shape (rollouts, 3)."""

    result: PointResult
    rate: float
    rows: list[str]
    times: Floats
    done: int
    """Of these; the others failed or ran out of time, and held their slots as well."""
    config: SimulationConfig

    @property
    def nodes(self) -> int:
        return self.result.spec.nodes


def simulate_series(
    results: Sequence[PointResult], nodes: Sequence[int], say: Callable[[str], None] = lambda words: None
) -> SimulatedSeries:
    """Foretell every measured point of the scaling series, then ``nodes``. Raises ConfigError if no point was measured,
    or the run directory of one is gone."""
    points = [_recorded(result, rate) for result in of_nodes(results) if (rate := steady(result))]
    if not points:
        raise ConfigError(
            "--simulate: no point of the series was measured, so there is nothing to fit the simulator from: measure at "
            "least two sizes first, such as nodes=1,2"
        )
    coordinator = fit_coordinator([point.result for point in points])
    message_s = coordinator.rollout_s / max(1e-3, 1 - coordinator.idle)
    checks = []
    for point in points:
        say(f"simulating {node_words(point.nodes)}, to compare with what was measured")
        checks.append(_check(point, [other for other in points if other is not point], message_s))
    base_rate = _rate(points[0], points, message_s)
    found = []
    for count in sorted(set(nodes)):
        say(f"simulating {count:,} nodes")
        found.append(_continued(points, count, message_s, base_rate / points[0].nodes, coordinator))
    why = _why_not(points, checks)
    return SimulatedSeries(
        fitted_from=[point.result.spec.name for point in points],
        base_nodes=points[0].nodes,
        coordinator=coordinator,
        checks=checks,
        points=found,
        valid=not why,
        why=why,
        conclusion=_conclusion(found, coordinator, base_rate / points[0].nodes, points[-1].config),
    )


def fit_coordinator(results: Sequence[PointResult]) -> Coordinator:
    """CPU time = idle + rollout_s × rate, by least squares over the points, neither below 0. With one point, or points
    that do not tell them apart, all of it counts as the rollouts', which makes the coordinator the sooner the limit."""
    pairs = [
        (result.figures.per_s, result.figures.coordinator_s * result.figures.per_s)
        for result in results
        if result.figures is not None and result.figures.coordinator_s is not None and result.figures.per_s > 0
    ]
    if not pairs:
        return Coordinator(0.0, 0.0, "its CPU time was not measured, so it is taken as never the limit")
    rates, used = np.array(pairs).T
    if len(pairs) > 1 and np.ptp(rates) > 0:
        rollout_s, idle = (float(value) for value in np.polyfit(rates, used, 1))
        if rollout_s > 0 and idle >= 0:
            words = f"{1000 * rollout_s:.3g} ms of CPU a rollout and {100 * idle:.2g} % of a CPU at rest"
            return Coordinator(rollout_s, idle, f"{words}, fitted from {len(pairs)} points")
    rollout_s = float(np.max(used / rates)) if len(pairs) == 1 else float(used @ rates / (rates @ rates))
    words = f"{1000 * rollout_s:.3g} ms of CPU a rollout, what it needs at rest included"
    return Coordinator(rollout_s, 0.0, f"{words}, from {len(pairs)} point{'s' if len(pairs) > 1 else ''}")


def _recorded(result: PointResult, rate: float) -> Recorded:
    record = read_json(Path(result.run_dir) / RECORD_FILE, LoadRecord)
    if record is None or not record.pool_sizes.get("run"):
        raise ConfigError(
            f"--simulate: the run of point {result.spec.name}, {result.run_dir}, has no {RECORD_FILE} that tells its pools: the simulator is "
            "fitted from the runs of a series, so keep their directories, or measure the series anew into another out="
        )
    rows, times, done = _read(RunDirectory(result.run_dir), result.spec.name)
    return Recorded(result, rate, rows, times, done, _config(result, record))


def _read(run: RunDirectory, name: str) -> tuple[list[str], Floats, int]:
    """Rows and stage times of the rollouts that ended by themselves, in the order of the load (by the numbers in their
    ids), and how many of them are done. A stage that a rollout did not come to took no time."""
    table = read_rollouts(run, columns=["rollout_id", "row_id", "status", "timings"]).to_pylist()
    ended = [row for row in table if row["status"] != Status.CANCELLED]
    done = sum(row["status"] == Status.DONE for row in ended)
    if not done:
        raise ConfigError(
            f"--simulate: there is no rollout of point {name} in {run.rollouts} any more: measure it anew"
        )
    ended.sort(key=lambda row: [int(number) for number in re.findall(r"\d+", row["rollout_id"])])
    spent = [{timing["stage"]: timing["busy_s"] for timing in row["timings"]} for row in ended]
    times = np.array([[busy_s.get(stage, 0.0) for stage in Stage] for busy_s in spent])
    return [row["row_id"] for row in ended], times, done


def _times(rows: Sequence[str], points: Sequence[Recorded]) -> Floats:
    """For each of ``rows`` in turn the next rollout of the same row among ``points``, or of any row where they have
    none of it; again from the first when all are used up."""
    known: dict[str, list[Floats]] = {}
    for point in points:
        for row, times in zip(point.rows, point.times, strict=True):
            known.setdefault(row, []).append(times)
    every = [times for point in points for times in point.times]
    cycles = {row: itertools.cycle(found) for row, found in known.items()}
    others = itertools.cycle(every)
    return np.array([next(cycles.get(row, others)) for row in rows])


def _config(result: PointResult, record: LoadRecord) -> SimulationConfig:
    """The same cluster and the same load."""
    spec, load, sizes = result.spec, result.spec.load, record.pool_sizes
    per_node = {pool: size // spec.nodes for pool, size in sizes.items()}
    coupled = "rollout.coupled=true" in spec.overrides
    uniform, informative = (sum(getattr(note, name) for note in record.batches) for name in ("uniform", "accepted"))
    ready = per_node.get("ready", 0)
    return SimulationConfig(
        rollouts=load.rollouts or load.batches * load.groups * load.group_size,
        nodes=spec.nodes,
        servers=spec.nodes,
        slots=per_node["run"],
        init_slots=per_node.get("init", 0),
        ready_slots=ready,
        ready_ratio=SimulationConfig.ready_ratio if ready else 0.0,
        eval_slots=per_node.get("eval", 0),
        coupled=coupled,
        group_size=load.group_size if load.batches else 1,
        groups_per_batch=load.groups if load.batches else 0,
        uniform_share=uniform / (uniform + informative) if uniform else 0.0,
        refill=load.refill.value,
        when_full=load.when_full.value,
        max_parallel_groups=load.max_parallel_groups,
        train_s=load.train_s,
        plot="",
    )


def _check(point: Recorded, others: Sequence[Recorded], coordinator_s: float) -> Check:
    replayed = _rate(point, [point], coordinator_s)
    foretold = _rate(point, others, coordinator_s) if others else replayed
    return Check(point.result.spec.name, point.nodes, point.rate, foretold, replayed)


def _rate(point: Recorded, known: Sequence[Recorded], coordinator_s: float) -> float:
    """Of the cluster and the rows of ``point``, with the stage times and the share of rollouts done of ``known``."""
    config = dataclasses.replace(point.config, coordinator_s=coordinator_s)
    return simulate(config, times=_times(point.rows, known)).steady_per_s * _done_share(known)


def _done_share(points: Sequence[Recorded]) -> float:
    return sum(point.done for point in points) / sum(len(point.rows) for point in points)


def _continued(
    points: Sequence[Recorded], nodes: int, coordinator_s: float, base_per_node: float, coordinator: Coordinator
) -> SimulatedPoint:
    """As many rollouts a node as the largest measured point had."""
    largest = points[-1]
    config = largest.config
    rollouts, groups = (round(count / largest.nodes * nodes) for count in (config.rollouts, config.groups_per_batch))
    parallel = round(config.max_parallel_groups / largest.nodes * nodes)
    grown = dataclasses.replace(
        config,
        nodes=nodes,
        servers=nodes,
        rollouts=rollouts,
        groups_per_batch=groups,
        max_parallel_groups=parallel,
        coordinator_s=coordinator_s,
    )
    result = simulate(grown, times=_times(largest.rows, points))
    rate = result.steady_per_s * _done_share(points)
    return SimulatedPoint(
        nodes=nodes,
        rollouts=rollouts,
        per_s=rate,
        efficiency=rate / nodes / base_per_node,
        utilisation=_utilisation(result),
        waits={stage: Times(waits.mean_s, waits.p50_s, waits.p99_s) for stage, waits in result.waits.items()},
        coordinator_busy=coordinator.idle + coordinator.rollout_s * rate,
    )


def _utilisation(result: SimulationResult) -> dict[str, float]:
    return {pool.name: pool.utilisation for pool in result.pools if pool.utilisation is not None}


def _why_not(points: Sequence[Recorded], checks: Sequence[Check]) -> str:
    """Why the continuation must not be trusted, and what to do; empty if it may."""
    if len(points) < 2:
        return (
            f"only one point was measured ({node_words(checks[0].nodes)}), so that it was foretold from itself, which proves "
            "nothing: measure at least two sizes, such as nodes=1,2,4"
        )
    off = [check for check in checks if abs(check.error) > ALLOWED_ERROR]
    if not off:
        return ""
    named = "; ".join(
        f"{check.foretold_per_s:.4g} rollouts/s foretold and {check.measured_per_s:.4g} measured at {node_words(check.nodes)} "
        f"({100 * check.error:+.0f} %)"
        for check in off
    )
    head = f"the simulator must foretell every measured point within {100 * ALLOWED_ERROR:.0f} %, but {named}. "
    if all(abs(check.replay_error) <= ALLOWED_ERROR for check in off):
        means = ", ".join(f"{point.times[:, 1].mean():.3g} s at {node_words(point.nodes)}" for point in points)
        return (
            f"{head}With each point's own stage times it does, so these differ between the points (RUN takes {means} on "
            "average): either there were too few rollouts, order more, or the machine slows down with more nodes"
        )
    return (
        f"{head}Not with their own stage times either, so slots were held for something that is no stage's time: look at "
        "the use of the pools in the report, and at rollouts that were not done"
    )


def _conclusion(
    points: Sequence[SimulatedPoint], coordinator: Coordinator, per_node: float, config: SimulationConfig
) -> str:
    """What the largest size comes to, and what saturates at which size."""
    if not points:
        return "no further size was asked for."
    last = points[-1]
    text = f"efficiency {last.efficiency:.3f} at {last.nodes:,} nodes"
    limit = ""
    if coordinator.rollout_s > 0:
        most = (1 - coordinator.idle) / coordinator.rollout_s
        limit = (
            f"one coordinator can serve {most:.4g} rollouts/s, which {most / per_node:,.0f} nodes of this workload give"
        )
    low = next((point for point in points if point.efficiency < EFFICIENCY_GOAL), None)
    if low is None:
        return f"{text}; the first part to saturate would be the coordinator: {limit}." if limit else f"{text}."
    if low.coordinator_busy >= _SATURATED:
        return f"{text}: the coordinator saturates. At {low.nodes:,} nodes efficiency is {low.efficiency:.3f}; {limit}."
    fullest = max(low.utilisation, key=lambda name: low.utilisation[name])
    waves = config.rollouts / (config.nodes * config.slots)
    few = f" With {waves:.1f} rollouts a RUN slot the ends weigh much: order more." if waves < _FEW_WAVES else ""
    return (
        f"{text}: below {EFFICIENCY_GOAL:g} from {low.nodes:,} nodes on, where {fullest} is fullest "
        f"({100 * low.utilisation[fullest]:.0f} % in use) and the coordinator takes {100 * low.coordinator_busy:.0f} % of a "
        f"CPU.{few}"
    )
