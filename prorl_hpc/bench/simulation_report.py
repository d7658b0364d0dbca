"""A simulation's result as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from prorl_hpc.bench.simulation import PoolUse, SimulationResult
from prorl_hpc.bench.simulation_compare import OWN, Comparison


def as_json(result: SimulationResult) -> dict[str, Any]:
    """All but the course over time."""
    shallow = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "course"}
    return {
        **shallow,
        "config": dataclasses.asdict(result.config),
        "pools": {
            pool.name: {"size": pool.size, "mean_in_use": pool.mean_in_use, "utilisation": pool.utilisation}
            for pool in result.pools
        },
        "waits": {stage: dataclasses.asdict(waits) for stage, waits in result.waits.items()},
        "batch_mean_s": result.batch_mean_s,
    }


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "results": {name: as_json(result) for name, result in comparison.results.items()},
        "gain": comparison.gain,
        "left_out": comparison.left_out,
    }


def tables(result: SimulationResult) -> Iterator[Table]:
    """The figures, the pools and the waits."""
    figures = _table("simulation", "")
    for name, value in _figures(result):
        figures.add_row(name, value)
    yield figures
    pools = _table("pool", "size", "mean in use", "utilisation")
    for pool in result.pools:
        pools.add_row(
            pool.name, "no limit" if pool.size is None else f"{pool.size:,g}", f"{pool.mean_in_use:,.1f}", _share(pool)
        )
    yield pools
    waits = _table("wait for", "mean", "p50", "p99")
    for stage, wait in result.waits.items():
        waits.add_row(stage, *(f"{seconds:,.2f} s" for seconds in (wait.mean_s, wait.p50_s, wait.p99_s)))
    yield waits


def comparison_table(comparison: Comparison) -> Table:
    """One line per policy."""
    batches = comparison.results[OWN].batch_mean_s is not None
    table = _table(
        "policy", "rollouts/s", "of ideal", "time to batch", "RUN slots at work", "wait p99", "virtual time", "gain"
    )
    for name, result in comparison.results.items():
        gain = comparison.gain.get(name)
        table.add_row(
            name,
            f"{result.throughput_per_s:,.2f}",
            _percent(result.throughput_per_s, result.ideal_per_s),
            f"{result.batch_mean_s:,.1f} s" if result.batch_mean_s is not None else "–",
            _percent(result.pool("run").mean_in_use, result.config.nodes * result.config.slots),
            f"{max(wait.p99_s for wait in result.waits.values()):,.2f} s",
            f"{result.virtual_s:,.0f} s",
            "1" if gain is None else f"{gain:.2f} ×",
        )
    table.caption = f"gain: {'time to batch' if batches else 'throughput'}, our own policy against this one"
    return table


def _figures(result: SimulationResult) -> Iterator[tuple[str, str]]:
    config = result.config
    yield "cluster", f"{config.nodes:,} nodes × {config.slots} slots, {config.servers} LLM servers, seed {config.seed}"
    ended = ", ".join(f"{count:,} {status}" for status, count in result.statuses.items() if count)
    yield "rollouts", f"{ended}; {result.retries:,} retries"
    yield (
        "throughput",
        f"{result.throughput_per_s:,.2f} rollouts/s; {result.steady_per_s:,.2f} without filling up and running dry",
    )
    share = _percent(result.throughput_per_s, result.ideal_per_s)
    yield "ideal", f"{result.ideal_per_s:,.2f} rollouts/s, limited by {result.limited_by}; reached: {share}"
    if result.batch_mean_s is not None:
        times = sorted(result.batch_s)
        yield (
            "time to batch",
            f"{result.batch_mean_s:,.1f} s mean, {statistics.median(times):,.1f} s median, {times[-1]:,.1f} s "
            f"longest of {len(times)}",
        )
    yield "virtual time", f"{result.virtual_s:,.1f} s"
    yield "this took", f"{result.wall_s:,.1f} s for {result.events:,} events, {result.peak_rss_mib:,.0f} MiB at most"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left")
    return table


def _share(pool: PoolUse) -> str:
    return "–" if pool.utilisation is None else f"{pool.utilisation:.1%}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
