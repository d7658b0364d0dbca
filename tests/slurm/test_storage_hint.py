"""What is said of a job that ended without leaving anything behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.job import Job, JobRecord
from prorl_hpc.slurm.traces import storage_hint


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    run = RunDirectory.create(config)
    run.begin_attempt(1)
    return run


def job(kind: str = "slurm") -> Job:
    return Job(JobRecord(kind, "17", "login", 0, 0.0))


def test_a_job_of_which_nothing_came_back_is_put_down_to_storage(run: RunDirectory) -> None:
    (run.jobs / "submission_file_x.sh").touch()
    hint = storage_hint(run, job())
    assert str(run.path) in hint and "run.root" in hint and "--on-nodes" in hint
    assert storage_hint(run, job("local")) == ""


@pytest.mark.parametrize("trace", ["jobs/17_0_log.out", "attempts/1/logs/launcher.log"])
def test_any_trace_of_the_job_tells_that_its_node_saw_the_directory(run: RunDirectory, trace: str) -> None:
    (run.path / trace).parent.mkdir(parents=True, exist_ok=True)
    (run.path / trace).touch()
    assert storage_hint(run, job()) == ""
