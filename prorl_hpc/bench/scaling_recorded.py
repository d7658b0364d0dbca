"""What the simulation of a series needs of its measured runs: rows, stage times, pools and load."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prorl_hpc.bench.scaling_records import RECORD_FILE, LoadRecord, PointResult, read_record
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_times import Floats
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Stage, Status
from prorl_hpc.observe.rollout_store import read_rollouts

_SHUFFLED = 20_000


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
    tokens: int = 0
    """Of a trajectory, on average."""

    @property
    def nodes(self) -> int:
        return self.result.spec.nodes


def recorded(result: PointResult, rate: float) -> Recorded:
    """Read the point's run. Raises ConfigError if it is gone, RunError if it is damaged."""
    record = read_record(Path(result.run_dir))
    if record is None or not record.pool_sizes.get("run"):
        raise ConfigError(
            f"--simulate: the run of point {result.spec.name}, {result.run_dir}, has no {RECORD_FILE} that tells its pools: the simulator is "
            "fitted from the runs of a series, so keep their directories, or measure the series anew into another out="
        )
    rows, times, done, tokens = _read(RunDirectory(result.run_dir), result.spec.name)
    return Recorded(result, rate, rows, times, done, _config(result, record), tokens)


def _read(run: RunDirectory, name: str) -> tuple[list[str], Floats, int, int]:
    """Rows and stage times of the rollouts that ended by themselves, in the order of the load (by the numbers in their
    ids), how many of them are done, and the mean tokens of a trajectory. A stage that a rollout did not come to took no
    time."""
    columns = ["rollout_id", "row_id", "status", "timings", "segment_lengths"]
    table = read_rollouts(run, columns=columns).to_pylist()
    ended = [row for row in table if row["status"] != Status.CANCELLED]
    done = sum(row["status"] == Status.DONE for row in ended)
    if not done:
        raise ConfigError(
            f"--simulate: there is no rollout of point {name} in {run.rollouts} any more: measure it anew"
        )
    ended.sort(key=lambda row: [int(number) for number in re.findall(r"\d+", row["rollout_id"])])
    spent = [{timing["stage"]: timing["busy_s"] for timing in row["timings"]} for row in ended]
    times = np.array([[busy_s.get(stage, 0.0) for stage in Stage] for busy_s in spent])
    tokens = sum(sum(row["segment_lengths"]) for row in ended) // len(ended)
    return [row["row_id"] for row in ended], times, done, tokens


def times_of(rows: Sequence[str], points: Sequence[Recorded]) -> Floats:
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


def shuffled(points: Sequence[Recorded], order: int) -> Floats:
    """Stage times of all points in a random order, many times over: one node's rows that come round and round in their
    own order would fit the pools by luck, well or badly."""
    every = np.concatenate([point.times for point in points])
    rng = np.random.default_rng(order)
    return np.concatenate([rng.permutation(every) for _ in range(max(1, _SHUFFLED // len(every)))])


def done_share(points: Sequence[Recorded]) -> float:
    return sum(point.done for point in points) / sum(len(point.rows) for point in points)
