"""A series of scaling runs: what becomes of its points, on this machine and on real Slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prorl_hpc.bench.scaling_records import (
    RESULTS_FILE,
    SERIES_FILE,
    LoadOrder,
    PointSpec,
    PointState,
    Series,
    point_file,
)
from prorl_hpc.bench.series_folder import read_series
from prorl_hpc.bench.series_point import RunningPoint
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import EngineConfig, ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.endings import OUT_OF_TIME, AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.failure import RunFailure, record_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.private.base import PrivateSlurm

SBATCH = Path(__file__).resolve().parents[2] / "sbatch" / "scaling.sbatch"
QUICK = ["workload=math-like", "rollouts=4", "minutes=5", "sandbox=local"]


def bench(*words: str) -> list[str]:
    return [sys.executable, "-m", "prorl_hpc", "bench", "scaling", *words]


@pytest.fixture
def ended(tmp_path: Path) -> RunDirectory:
    """A run on this machine whose job is gone."""
    config = ProrlConfig(
        run=RunSettings(name="nodes-1", root=str(tmp_path / "runs")),
        engine=EngineConfig(kind="scripted", script={"token_s": 0.02}),
        trainer=TrainerConfig(enabled=False),
    )
    run = RunDirectory.create(config)
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    Job.submitted(run, "local", str(gone.pid))
    return run


def spec(minutes: int = 30) -> PointSpec:
    return PointSpec("nodes-1", 1, ["bench=mixed"], LoadOrder(rollouts=10), time_minutes=minutes)


def test_a_point_that_ran_out_of_time_says_so_and_what_to_do(ended: RunDirectory) -> None:
    write_ending(ended, AttemptEnding(Ending.SUSPENDED, OUT_OF_TIME, time.time()))
    point = RunningPoint(spec(minutes=7), ended)
    assert point.over()
    result = point.result()
    assert result.state is PointState.TIMED_OUT
    assert "its 7 minutes were over" in result.why
    assert "minutes=" in result.why
    assert result.figures is None
    assert (result.workload, result.engine) == ("mixed", "scripted: each token 0.02 s")


def test_a_point_that_failed_says_why(ended: RunDirectory) -> None:
    record_failure(ended, RunFailure("worker-0", "cpu01", "exited with code 3", 3, ["no space left"]))
    result = RunningPoint(spec(), ended).result()
    assert result.state is PointState.FAILED
    assert "worker-0 on cpu01 exited with code 3" in result.why
    assert "no space left" in result.why


def test_a_point_whose_run_was_stopped_or_left_nothing_is_failed_too(ended: RunDirectory) -> None:
    assert "ended without a word" in RunningPoint(spec(), ended).result().why
    write_ending(ended, AttemptEnding(Ending.STOPPED, "somebody wanted that", time.time()))
    result = RunningPoint(spec(), ended).result()
    assert (result.state, "was stopped (somebody wanted that)" in result.why) == (PointState.FAILED, True)
    ended.finished_marker.touch()
    assert "left no bench_record.json" in RunningPoint(spec(), ended).result().why


def test_results_come_in_the_order_of_the_points(ended: RunDirectory, tmp_path: Path) -> None:
    first, second = PointSpec("a", 1, [], LoadOrder(rollouts=1)), PointSpec("b", 2, [], LoadOrder(rollouts=1))
    write_json(tmp_path / SERIES_FILE, Series([], "local", [first, second]))
    assert read_series(tmp_path)[1] == []
    (tmp_path / "points").mkdir()
    for point in (second, first):
        write_json(point_file(tmp_path, point.name), RunningPoint(point, ended).result())
    assert [result.spec.name for result in read_series(tmp_path)[1]] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"no series.json"):
        read_series(tmp_path / "points")


def test_a_series_that_was_killed_goes_on_with_the_run_that_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    with subprocess.Popen(bench("nodes=1,2", *QUICK, "--local", f"out={folder}"), stderr=subprocess.PIPE) as first:
        deadline = time.monotonic() + 60
        while not (folder / "points" / "nodes-1.run").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    going_on = subprocess.run(bench(f"out={folder}", "--json"), capture_output=True, text=True, timeout=200)
    assert "nodes-1: goes on with" in going_on.stderr
    series, results = read_series(folder)
    assert [result.state for result in results] == [PointState.DONE] * 2, going_on.stderr
    assert len(list((folder / "runs").glob("*/nodes-*"))) == 2
    assert pq.read_table(folder / RESULTS_FILE).num_rows == 4 + 8
    assert {figure["name"] for figure in json.loads(going_on.stdout)["figures"]} > {"efficiency at 2 nodes"}
    assert (folder / "report.md").exists()
    assert series.command[:4] == ["prorl-hpc", "bench", "scaling", "nodes=1,2"]


@pytest.mark.slurm
def test_points_are_jobs_of_the_cluster_and_too_many_nodes_are_refused(
    slurm_mini: PrivateSlurm, tmp_path: Path
) -> None:
    folder = tmp_path / "series"
    words = ["cluster.rollout.partition=cpu", "cluster.inference.partition=gpu", *QUICK, f"out={folder}"]
    refused = slurm_mini.run(bench("nodes=1,3", *words, "cluster.inference.partition=cpu"))
    assert refused.returncode == 2
    assert "nothing was started" in refused.stderr
    assert "need 6 different nodes" in refused.stderr and "(in nodes-3)" in refused.stderr
    assert not folder.exists()
    refused = slurm_mini.run(bench("nodes=16", *words))
    assert "cluster.rollout.nodes=16: partition cpu gives at most 4 nodes" in refused.stderr

    # through a small job, as on a site that ends long-lived processes of its login nodes
    submit = ["sbatch", "--wait", "--output=job.out", str(SBATCH), "nodes=1,2", "at_once=2", *words]
    slurm_mini.run(["env", "-C", str(tmp_path), f"PRORL_PYTHON={sys.executable}", *submit], timeout_s=240)
    said = (tmp_path / "job.out").read_text()
    _, results = read_series(folder)
    assert [result.state for result in results] == [PointState.DONE] * 2, said
    assert {row["nodes"] for row in pq.read_table(folder / RESULTS_FILE).to_pylist()} == {1, 2}
    assert f"report: {folder / 'report.md'}" in said
