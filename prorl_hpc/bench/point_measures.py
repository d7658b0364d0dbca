"""What a point's run came to: from its rollouts on disk and what the load process noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prorl_hpc.bench.freed_engines import freed_s
from prorl_hpc.bench.scaling_records import (
    GaugeSample,
    LoadRecord,
    PointFigures,
    PointResult,
    PointSpec,
    Times,
    read_record,
)
from prorl_hpc.bench.steady_rate import span, steady_error, steady_rate
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.inference.request_records import read_requests
from prorl_hpc.messages.batch import WhenFull
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Stage, StageTiming, Status
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.observe.run_figures import RunFigures

STAGES = tuple(stage.value for stage in Stage)
POOLS = ("init", "ready", "run", "eval")
FEWEST_SAMPLES = 3
"""A mean of fewer says what was at a moment, and is not told."""
_COLUMNS = ["rollout_id", "status", "metrics", "timings", "worker", "server", "segment_lengths", "weight_versions"]


def measure(run: RunDirectory, record: LoadRecord, spec: PointSpec) -> PointFigures:
    """RunError if no rollout of the run is done, or not all are on disk: there is nothing to make figures of."""
    rows = read_rows_of(run, record)
    done = [row for row in rows if row["status"] == Status.DONE]
    if not done:
        raise RunError(_nothing_done(run, rows, spec))
    if spec.load.when_full is WhenFull.CARRY:
        # What was carried on past the last batch ends when nobody notes it any more, before the run is taken down.
        done = [row for row in done if row["ended_at_s"] is not None]
    if late := sum(row["ended_at_s"] is None for row in done):
        raise RunError(f"{spec.name}: {late} rollouts of {run.path} are done that bench_record.json does not know")
    seconds = record.ended - record.began
    coupled = run.load_config().rollout.coupled
    spans = np.array([_span(row) for row in done])
    whole = (0.0, seconds, len(done) / seconds)
    first, last, steady_per_s = steady_rate(spans, record.pool_sizes, coupled=coupled) or whole
    samples = [s for s in record.samples if first <= s.at - record.began <= last]
    samples = samples if len(samples) >= FEWEST_SAMPLES else []
    asked = sum(row["tool_calls"] for row in done)
    extra_s = sum(row["tool_s"] - row["tool_asked_s"] for row in done)
    return PointFigures(
        done=len(done),
        not_done=len(rows) - len(done),
        seconds=seconds,
        per_s=len(done) / seconds,
        steady_per_s=steady_per_s,
        utilisation=utilisation(samples, record.pool_sizes, coupled=coupled),
        waits={stage: _times([row[f"{stage}_queued_s"] for row in done]) for stage in STAGES},
        stages={stage: _times([row[f"{stage}_busy_s"] for row in done]) for stage in STAGES},
        turns_per_s=steady_per_s * _mean(done, "turns"),
        generated_tokens_per_s=steady_per_s * _mean(done, "tokens"),
        tool_call_s=extra_s / asked if asked else None,
        batch_s=[note.seconds for note in record.batches],
        engine_busy=_mean_of(_per_server(samples, lambda running, waiting: float(running + waiting > 0))),
        engine_requests=_mean_of(_per_server(samples, lambda running, waiting: float(running))),
        trainer_busy=record.trained_s / seconds if record.batches else None,
        coordinator_s=None if record.coordinator_cpu_s is None else record.coordinator_cpu_s / len(done),
        prefix_hit_rate=_prefix_hit_rate(run),
        freed_s=freed_s(record, spec.load.train_s),
        restarts=dict(Counter(restart.name for restart in read_restarts(run))),
        short_turns=sum(row["short_turns"] for row in done),
        steady_error=steady_error(spans, record.pool_sizes, coupled=coupled),
    )


def _span(row: dict[str, Any]) -> tuple[float, ...]:
    timings = [StageTiming(stage, row[f"{stage.value}_queued_s"], row[f"{stage.value}_busy_s"]) for stage in Stage]
    return span(row["ended_at_s"], timings)


def utilisation(samples: Sequence[GaugeSample], sizes: dict[str, int], *, coupled: bool) -> dict[str, float]:
    """Mean share of each pool's slots that is in use. Coupled, there is one pool: ``run`` is the share of its slots that
    is in RUN, ``coupled`` the share that is held at all."""
    if not samples:
        return {}
    mean = {pool: sum(s.pools.get(pool, 0) for s in samples) / len(samples) for pool in POOLS}
    if coupled:
        held = {"coupled": sum(mean.values()), "run": mean["run"]}
        return {name: used / sizes["run"] for name, used in held.items()}
    return {pool: mean[pool] / sizes[pool] for pool in POOLS if sizes.get(pool)}


def rollout_table(results: Sequence[PointResult]) -> pa.Table:
    """Every rollout of every point whose run directory is there, ROLLOUT_SCHEMA; those of a point that failed too, as far as
    they came. ``ended_at_s``: seconds after the point's load began; null where nobody noted it."""
    rows = []
    for result in results:
        path, spec = Path(result.run_dir), result.spec
        if not result.run_dir or not path.is_dir():
            continue
        place = {"point": spec.name, "nodes": spec.nodes, "series": spec.series, "variant": spec.variant}
        rows += [place | row for row in read_rows_of(RunDirectory(path), read_record(path))]
    return pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)


ROLLOUT_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("point", "series", "variant", "rollout_id", "status", "worker", "server")),
        ("nodes", pa.int32()),
        ("ended_at_s", pa.float64()),
        *((f"{stage}_{what}", pa.float64()) for stage in STAGES for what in ("queued_s", "busy_s")),
        ("turns", pa.int32()),
        ("short_turns", pa.int32()),
        ("tokens", pa.int64()),
        ("tool_calls", pa.int32()),
        ("tool_s", pa.float64()),
        ("tool_asked_s", pa.float64()),
    ]
)


def read_rows_of(run: RunDirectory, record: LoadRecord | None) -> list[dict[str, Any]]:
    """The run's rollouts as rows of ROLLOUT_SCHEMA, without the point."""
    ended_at = {} if record is None else {name: at - record.began for name, at in record.ended_at.items()}
    return [_row(values, ended_at) for values in read_rollouts(run, _COLUMNS).to_pylist()]


def _row(values: dict[str, Any], ended_at: dict[str, float]) -> dict[str, Any]:
    """A stage that a rollout did not come to took no time."""
    timings = {timing["stage"]: timing for timing in values["timings"]}
    metrics = dict(values["metrics"])
    versions, lengths = values["weight_versions"], values["segment_lengths"]
    row = {name: values[name] for name in ("rollout_id", "status", "worker", "server")}
    row["ended_at_s"] = ended_at.get(values["rollout_id"])
    for stage in STAGES:
        for what in ("queued_s", "busy_s"):
            row[f"{stage}_{what}"] = timings[stage][what] if stage in timings else 0.0
    row["turns"] = int(metrics.get("turns", sum(version is not None for version in versions)))
    row["tokens"] = sum(n for version, n in zip(versions, lengths, strict=True) if version is not None)
    row |= {name: int(metrics.get(name, 0)) for name in ("short_turns", "tool_calls")}
    row |= {name: metrics.get(name, 0.0) for name in ("tool_s", "tool_asked_s")}
    return row


def _times(seconds: Sequence[float]) -> Times:
    p50, p99 = np.percentile(seconds, (50, 99))
    return Times(float(np.mean(seconds)), float(p50), float(p99))


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows)) / len(rows)


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _per_server(samples: Sequence[GaugeSample], of: Callable[[int, int], float]) -> list[float]:
    """``of`` a server's running and waiting requests, over all servers of all samples."""
    return [of(running, sample.waiting.get(name, 0)) for sample in samples for name, running in sample.running.items()]


def _prefix_hit_rate(run: RunDirectory) -> float | None:
    """Of all requests that the servers' agents recorded (engine.record_requests). None without a record, and where no
    engine found anything cached: one without a cache says the same."""
    records = [record for server in read_requests(run.requests) for record in server.records]
    cached, prompts = (sum(getattr(r, f"{name}_tokens") for r in records) for name in ("cached", "prompt"))
    return cached / prompts if cached else None


def _nothing_done(run: RunDirectory, rows: Sequence[dict[str, Any]], spec: PointSpec) -> str:
    if not rows:
        return (
            f"{spec.name}: there are no rollouts in {run.rollouts}: a point needs rollout.keep_trajectories=true, and a run "
            "that came so far; look with `prorl-hpc status`"
        )
    counted = ", ".join(f"{n} {status}" for status, n in Counter(row["status"] for row in rows).items())
    return f"{spec.name}: none of its rollouts is done ({counted}){_commonest_failure(run)}. All failures are in {run.rollouts}"


def _commonest_failure(run: RunDirectory) -> str:
    for broken in RunFigures.of(run).breakages[:1]:
        return f"; {broken.count} of them broke in {broken.stage or 'no stage'} ({broken.kind}): {broken.message}"
    return ""
