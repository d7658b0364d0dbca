"""A series of a workload of one's own; and what a point tells while its run starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.bench import series_point
from prorl_hpc.bench.scaling import points_of, read_words
from prorl_hpc.bench.scaling_records import LoadOrder, PointSpec
from prorl_hpc.bench.series_launch import compose_points
from prorl_hpc.bench.series_point import RunningPoint
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import EngineConfig, ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.config.store import conf_dir
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.job import Job


def test_a_series_goes_on_without_the_file_of_its_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path / "mine"))
    file = tmp_path / "mine" / "bench" / "mywork.yaml"
    file.parent.mkdir(parents=True)
    text = (conf_dir() / "bench" / "math-like.yaml").read_text()
    file.write_text(text.replace("uniform:1.5:3.5", "constant:7"))
    points = points_of(read_words(["nodes=1", "workload=mywork", "rollouts=4"]), "local")
    folder = tmp_path / "series"
    folder.mkdir()
    for _ in range(2):
        (composed,) = compose_points(points, "local", folder)
        assert composed.config.task.options["kinds"]["math"]["turns"] == "constant:7"
        file.unlink(missing_ok=True)


def test_a_point_tells_what_its_run_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_point, "TOLD_EVERY_S", 0.0)
    config = ProrlConfig(
        run=RunSettings(name="nodes-1", root=str(tmp_path / "runs")),
        engine=EngineConfig(kind="scripted", script={"token_s": 0.02}),
        trainer=TrainerConfig(enabled=False),
    )
    run = RunDirectory.create(config)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as job:
        Job.submitted(run, "local", str(job.pid))
    running = RunningPoint(PointSpec("nodes-1", 1, [], LoadOrder(rollouts=10)), run)
    assert running.news() == "nodes-1: still starting: no process has reported yet"
    state = ProcessState("inference-0", "inference", "here", 1, Phase.STARTING, "starting the engine")
    write_json(run.process_state(state.name), state)
    for _ in range(2):  # again and again: it may take minutes
        assert running.news() == "nodes-1: still starting: inference-0 (starting the engine)"
