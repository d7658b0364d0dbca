"""Simulates the rollout service: the scheduler, the balancer and the group sampler of ``core``, under a virtual clock."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prorl_hpc.bench.simulation_cluster import Cluster
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_gauges import Course, Place
from prorl_hpc.bench.simulation_tally import Tally
from prorl_hpc.bench.simulation_times import Floats
from prorl_hpc.bench.steady_rate import steady_rate
from prorl_hpc.messages.rollout import Stage, Status


@dataclass(frozen=True)
class PoolUse:
    """A pool of all nodes together. ``size`` None: no limit of its own."""

    name: str
    size: float | None
    mean_in_use: float

    @property
    def utilisation(self) -> float | None:
        return self.mean_in_use / self.size if self.size else None


@dataclass(frozen=True)
class Waits:
    """Seconds waited for a stage."""

    mean_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class SimulationResult:
    """Rates are rollouts that are done per second of virtual time."""

    config: SimulationConfig
    throughput_per_s: float
    """From the start to the end of the last rollout."""
    steady_per_s: float
    """Without filling up and running dry (steady_rate)."""
    ideal_per_s: float
    """What the tightest pool could do if it always had work."""
    limited_by: str
    """That pool."""
    pools: list[PoolUse]
    waits: dict[str, Waits]
    statuses: dict[str, int]
    retries: int
    batch_s: list[float]
    """Seconds from the order of each batch to its end; empty without batches."""
    course: Course
    virtual_s: float
    wall_s: float
    events: int
    peak_rss_mib: float
    """Of this process, since it started."""

    def pool(self, name: str) -> PoolUse:
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def batch_mean_s(self) -> float | None:
        return statistics.fmean(self.batch_s) if self.batch_s else None


def simulate(
    config: SimulationConfig, look: Callable[[int, float], None] | None = None, times: Floats | None = None
) -> SimulationResult:
    """Run one simulation. ``look(rollouts ended, virtual now)`` is called now and then, for a display. ``times`` as in
    ``Draws``: stage times to replay.

    Raises ConfigError for settings out of range and for a recorded run without finished rollouts; RunError if the
    simulation comes to a halt.
    """
    config.check()
    cluster = Cluster(config, times)
    began = time.perf_counter()
    # Nothing here makes cycles; looking for them among some million objects would take a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        virtual_s = cluster.run(look)
    finally:
        if collecting:
            gc.enable()
    wall_s = time.perf_counter() - began
    tally = cluster.tally
    ideal_per_s, limited_by = _ideal(config, tally)
    return SimulationResult(
        config=config,
        throughput_per_s=tally.done / virtual_s if virtual_s else 0.0,
        steady_per_s=_steady(config, tally),
        ideal_per_s=ideal_per_s,
        limited_by=limited_by,
        pools=[*_pools(config, cluster.gauges.areas(virtual_s), virtual_s), *_coordinator(cluster, virtual_s)],
        waits={stage.value: _waits(tally.waits_s[stage]) for stage in Stage},
        statuses={status.value: tally.statuses[status] for status in Status if status.terminal},
        retries=tally.retries,
        batch_s=cluster.batch_s,
        course=cluster.gauges.course(),
        virtual_s=virtual_s,
        wall_s=wall_s,
        events=tally.events,
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _waits(values: array[float]) -> Waits:
    if not values:
        return Waits(0.0, 0.0, 0.0)
    seconds = np.frombuffer(values)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Waits(float(seconds.mean()), float(p50), float(p99))


def _steady(config: SimulationConfig, tally: Tally) -> float:
    pools = config.pools
    sizes = {stage.value: config.nodes * getattr(pools, stage.value) for stage in Stage}
    spans = np.frombuffer(tally.spans).reshape(-1, 6)
    found = steady_rate(spans, sizes, coupled=pools.coupled)
    return found[2] if found is not None else 0.0


def _ideal(config: SimulationConfig, tally: Tally) -> tuple[float, str]:
    """From the times of the very rollouts that were done, so that chance in the draws cancels out."""
    if not tally.done:
        return 0.0, "none was done"
    means = [work_s / tally.done for work_s in tally.work_s]
    held = [mean + 2 * config.latency_s for mean in means]
    pools = config.pools
    limits: dict[str, tuple[float, float]]
    if pools.coupled:
        limits = {"run": (config.nodes * pools.run, sum(held))}
    else:
        sizes = (pools.init, pools.run, pools.eval)
        limits = {
            stage.value: (config.nodes * size, held_s) for stage, size, held_s in zip(Stage, sizes, held, strict=True)
        }
    if config.server_concurrency:
        limits["servers"] = (config.servers * config.server_concurrency, means[1] * config.generation_share)
    limits["coordinator"] = (1, config.coordinator_s)
    rates = {name: size / held_s for name, (size, held_s) in limits.items() if held_s > 0}
    if not rates:
        return 0.0, "no stage takes time"
    tightest = min(rates, key=lambda name: rates[name])
    return rates[tightest], tightest


def _coordinator(cluster: Cluster, virtual_s: float) -> list[PoolUse]:
    """Its one CPU; nothing where it takes no time."""
    busy_s = cluster.coordinator.busy_s
    return [PoolUse("coordinator", 1, busy_s / virtual_s)] if busy_s and virtual_s else []


def _pools(config: SimulationConfig, areas: list[float], virtual_s: float) -> list[PoolUse]:
    mean = [area / virtual_s if virtual_s else 0.0 for area in areas]
    pools, nodes = config.pools, config.nodes
    if pools.coupled:
        held = sum(mean[place] for place in Place if place is not Place.SERVED)
        stages = [PoolUse("slots", nodes * pools.run, held)]
        stages += [PoolUse(stage.value, None, mean[Place[stage.name]]) for stage in Stage]
    else:
        stages = [
            PoolUse("init", nodes * pools.init, mean[Place.INIT]),
            PoolUse("ready", nodes * pools.ready, mean[Place.READY]),
            PoolUse("run", nodes * pools.run, mean[Place.RUN]),
            PoolUse("eval", nodes * pools.eval, mean[Place.EVAL]),
        ]
    if config.server_concurrency:
        return [*stages, PoolUse("servers", config.servers * config.server_concurrency, mean[Place.SERVED])]
    return [*stages, PoolUse("servers", None, mean[Place.RUN])]
