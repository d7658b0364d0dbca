"""Continues a measured series by simulation: fitted from the points' recorded stage times, held against each of them.

The simulator runs the service's own scheduler. What it is given is the order of the dataset rows and, for each rollout,
the three stage times that one of the same row took. A measured point is foretold from the rollouts of the *other* points,
so that none of its times is in what foretells it; the continuation uses all.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from prorl_hpc.bench.scaling_figures import EFFICIENCY_GOAL, LARGE_ERROR, node_words, of_nodes, steady, steady_error
from prorl_hpc.bench.scaling_recorded import Recorded, done_share, recorded, shuffled, times_of
from prorl_hpc.bench.scaling_records import PointResult, Times
from prorl_hpc.bench.scaling_simulated import ALLOWED_ERROR, Check, Coordinator, SimulatedPoint, SimulatedSeries
from prorl_hpc.bench.simulation import SimulationResult, simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.messages.errors import ConfigError

_SATURATED = 0.9
_WAVES = 64
"""Rollouts a RUN slot of the continuation: with fewer the steady time still has much of filling up and running dry in it."""
_MOST_ROLLOUTS = 600_000
"""Of one simulated point: about a minute."""
_BASE_ROLLOUTS = 6000


def simulate_series(
    results: Sequence[PointResult],
    nodes: Sequence[int],
    say: Callable[[str], None] = lambda words: None,
    cost: Callable[[Recorded], Coordinator] | None = None,
) -> SimulatedSeries:
    """Foretell every measured point of the scaling series, then ``nodes``. ``cost``: of a coordinator of rollouts
    like those of a point (coordinator_cost); without it, as fitted from the points.
    Raises ConfigError if no point was measured, or the run directory of one is gone."""
    points = [recorded(result, rate) for result in of_nodes(results) if (rate := steady(result))]
    if not points:
        raise ConfigError(
            "--simulate: no point of the series was measured, so there is nothing to fit the simulator from: measure at "
            "least two sizes first, such as nodes=1,2"
        )
    coordinator = fit_coordinator([point.result for point in points]) if cost is None else cost(points[-1])
    checks = []
    for point in points:
        say(f"simulating {node_words(point.nodes)}, to compare with what was measured")
        checks.append(
            _check(point, [other for other in points if other is not point], coordinator.message_s(point.nodes))
        )
    found: list[SimulatedPoint] = []
    bases: dict[float, float] = {}
    for count in sorted(set(nodes)):
        say(f"simulating {node_words(count)}")
        per_node = _rollouts_per_node(points[-1].config, count)
        if per_node not in bases:
            bases[per_node] = _base(points, per_node, coordinator.message_s(points[0].nodes))
        found.append(_continued(points, count, per_node, bases[per_node], coordinator))
    why = _why_not(points, checks)
    return SimulatedSeries(
        fitted_from=[point.result.spec.name for point in points],
        base_nodes=points[0].nodes,
        coordinator=coordinator,
        checks=checks,
        points=found,
        valid=not why,
        why=why,
        conclusion=_conclusion(found, coordinator, min(bases.values(), default=0.0)),
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


def _check(point: Recorded, others: Sequence[Recorded], coordinator_s: float) -> Check:
    replayed = _rate(point, [point], coordinator_s)
    foretold = _rate(point, others, coordinator_s) if others else replayed
    return Check(point.result.spec.name, point.nodes, point.rate, foretold, replayed)


def _rate(point: Recorded, known: Sequence[Recorded], coordinator_s: float) -> float:
    """Of the cluster and the rows of ``point``, with the stage times and the share of rollouts done of ``known``."""
    config = dataclasses.replace(point.config, coordinator_s=coordinator_s)
    return simulate(config, times=times_of(point.rows, known)).steady_per_s * done_share(known)


def _rollouts_per_node(config: SimulationConfig, nodes: int) -> float:
    """At least as many as were measured."""
    measured = config.rollouts / config.nodes
    return measured if config.groups_per_batch else max(measured, min(_WAVES * config.slots, _MOST_ROLLOUTS / nodes))


def _base(points: Sequence[Recorded], per_node: float, coordinator_s: float) -> float:
    """The rate of a node at the smallest measured size, simulated as the larger ones: with as many rollouts a node, so that
    filling up and running dry weigh the same, and as the mean over orders of the rollouts, for it has few of them."""
    nodes = points[0].nodes
    config = dataclasses.replace(_grown(points, nodes, per_node), coordinator_s=coordinator_s)
    orders = max(1, round(_BASE_ROLLOUTS / config.rollouts))
    rates = [simulate(config, times=shuffled(points, order)).steady_per_s for order in range(orders)]
    return done_share(points) * statistics.fmean(rates) / nodes


def _continued(
    points: Sequence[Recorded],
    nodes: int,
    per_node: float,
    base_per_node: float,
    coordinator: Coordinator,
) -> SimulatedPoint:
    grown = dataclasses.replace(_grown(points, nodes, per_node), coordinator_s=coordinator.message_s(nodes))
    result = simulate(grown, times=shuffled(points, 0))
    rate = done_share(points) * result.steady_per_s
    return SimulatedPoint(
        nodes=nodes,
        rollouts=grown.rollouts,
        per_s=rate,
        efficiency=rate / nodes / base_per_node,
        utilisation=_utilisation(result),
        waits={stage: Times(waits.mean_s, waits.p50_s, waits.p99_s) for stage, waits in result.waits.items()},
        coordinator_busy=coordinator.at_rest(nodes) + coordinator.rollout_s * rate,
    )


def _grown(points: Sequence[Recorded], nodes: int, per_node: float) -> SimulationConfig:
    """The largest measured point's cluster with ``nodes``."""
    config = points[-1].config

    def scaled(count: int) -> int:
        return round(count / config.nodes * nodes)

    return dataclasses.replace(
        config,
        nodes=nodes,
        servers=nodes,
        rollouts=round(per_node * nodes),
        groups_per_batch=scaled(config.groups_per_batch),
        max_parallel_groups=scaled(config.max_parallel_groups),
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
        f"({100 * check.error:+.1f} %)"
        for check in off
    )
    head = f"the simulator must foretell every measured point within {100 * ALLOWED_ERROR:.0f} %, but {named}. "
    if all(abs(check.replay_error) <= ALLOWED_ERROR for check in off):
        means = ", ".join(f"{point.times[:, 1].mean():.3g} s at {node_words(point.nodes)}" for point in points)
        return (
            f"{head}With each point's own stage times it does, so these differ between the points (RUN takes {means} on "
            "average): either there were too few rollouts, order more, or the machine slows down with more nodes"
        )
    return f"{head}{_not_even_replayed(points, checks)}"


def _not_even_replayed(points: Sequence[Recorded], checks: Sequence[Check]) -> str:
    """What can be known of points that are not foretold from their own stage times, and what to do."""
    off = [
        (point, check)
        for point, check in zip(points, checks, strict=True)
        if max(abs(check.error), abs(check.replay_error)) > ALLOWED_ERROR
    ]
    each = "; ".join(
        f"{100 * check.replay_error:+.1f} % at {node_words(check.nodes)}, of {_count_words(point.result)}"
        for point, check in off
    )
    errors = [steady_error(point.result) for point, _ in off]
    text = f"With a point's own stage times it is off too ({each}): these do not explain the rate. "
    if any(error is None or error > LARGE_ERROR for error in errors):
        return (
            f"{text}The order and the ends of so few rollouts may alone do it: order more (rollouts=), until the rate is known to "
            f"{100 * LARGE_ERROR:.0f} % (± in the report), before anything else is looked for"
        )
    return (
        f"{text}They are enough for a steady rate, so time may pass that no stage counts: see how full the pools were in "
        "the report, rollouts that were not done, and whether processes died or nodes shared cores"
    )


def _count_words(result: PointResult) -> str:
    """Rollouts done, and how full RUN was, where it is known."""
    assert result.figures is not None
    use = result.figures.utilisation.get("run")
    return f"{result.figures.done:,} rollouts" + ("" if use is None else f" with RUN {100 * use:.0f} % in use")


def _conclusion(points: Sequence[SimulatedPoint], coordinator: Coordinator, per_node: float) -> str:
    """What the largest size comes to, and what saturates at which size."""
    if not points:
        return "no further size was asked for."
    last = points[-1]
    text = f"efficiency {last.efficiency:.3f} at {last.nodes:,} nodes"
    limit = ""
    if coordinator.rollout_s > 0:
        most = coordinator.most_nodes(per_node)
        limit = f"one coordinator can serve {most:,.0f} nodes of this workload beside their heartbeats, {most * per_node:.4g} rollouts/s"
    low = next((point for point in points if point.efficiency < EFFICIENCY_GOAL), None)
    if low is None:
        return f"{text}; the first part to saturate would be the coordinator: {limit}." if limit else f"{text}."
    if low.coordinator_busy >= _SATURATED:
        first = "" if low is last else f", {low.efficiency:.3f} at {low.nodes:,}"
        return f"{text}{first}: the coordinator saturates; {limit}."
    fullest = max(low.utilisation, key=lambda name: low.utilisation[name])
    return (
        f"{text}: below {EFFICIENCY_GOAL:g} from {low.nodes:,} nodes on, where {fullest} is fullest "
        f"({100 * low.utilisation[fullest]:.0f} % in use) and the coordinator takes {100 * low.coordinator_busy:.0f} % of a "
        "CPU."
    )
