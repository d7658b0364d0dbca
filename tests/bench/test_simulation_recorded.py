"""Stage times of a run that was recorded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import recorded_times
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.observe.rollout_store import SCHEMA


def row(status: str, **busy_s: float) -> dict[str, object]:
    empty = {name: [] for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type)}
    timings = [{"stage": stage, "queued_s": 0.0, "busy_s": seconds} for stage, seconds in busy_s.items()]
    return {**empty, "rollout_id": "r", "metrics": [], "status": status, "timings": timings}


def run_with(tmp_path: Path, *rows: dict[str, object]) -> str:
    run = RunDirectory(tmp_path)
    run.rollouts.mkdir()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), run.rollouts / "b0.parquet")
    return str(tmp_path)


def test_only_finished_rollouts_count(tmp_path: Path) -> None:
    path = run_with(
        tmp_path,
        row("done", init=1.0, run=10.0, eval=2.0),
        row("done", init=3.0, run=30.0, eval=4.0),
        row("failed", init=100.0, run=100.0),
        row("cancelled"),
    )
    assert sorted(recorded_times(path).tolist()) == [[1.0, 10.0, 2.0], [3.0, 30.0, 4.0]]


def test_times_of_one_rollout_stay_together(tmp_path: Path) -> None:
    path = run_with(tmp_path, row("done", init=0.0, run=10.0, eval=0.0), row("done", init=0.0, run=0.0, eval=10.0))
    result = simulate(SimulationConfig(rollouts=2000, nodes=1, slots=4, recorded=path, plot="", arrivals="20"))
    busy_s = [result.pool(stage).mean_in_use * result.virtual_s for stage in ("run", "eval")]
    assert sum(busy_s) == pytest.approx(2000 * 10.0)
    assert busy_s[0] == pytest.approx(1000 * 10.0, rel=0.1)


def test_a_run_without_finished_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished rollout"):
        recorded_times(run_with(tmp_path, row("failed", init=1.0)))
    with pytest.raises(ConfigError, match="no finished rollout"):
        recorded_times(str(tmp_path / "nowhere"))
    (tmp_path / "rollouts" / "b1.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="cannot be read"):
        recorded_times(str(tmp_path))
