"""A run of one machine that was started in the allocation of a Slurm job, seen from outside of its node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm import job as job_module
from prorl_hpc.slurm.attaching import attach_words
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import Job, JobRecord
from prorl_hpc.slurm.run_states import RUNNING, STOPPED, run_state
from prorl_hpc.slurm.states import JobReport, JobReports
from prorl_hpc.slurm.steps import PlacedNode


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Started on cpu07, in job 26, which runs."""
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    run = RunDirectory.create(config)
    run.begin_attempt(1)
    record = JobRecord("local", "4711", "cpu07", 1, time.time(), directory=str(run.path), enclosing="26")
    write_json(run.jobs / "job.json", record)
    write_json(run.placement_file, [PlacedNode(0, "rollout", "cpu07", 0)])
    says(monkeypatch, JobReports({"26": JobReport("RUNNING")}))
    return run


def says(monkeypatch: pytest.MonkeyPatch, answer: JobReports) -> None:
    monkeypatch.setattr(job_module, "job_reports", lambda ids: answer if list(ids) == ["26"] else JobReports())


def opened(run: RunDirectory) -> Job:
    job = Job.open(run)
    assert job is not None
    return job


def test_it_lives_as_long_as_that_job_or_until_it_says_that_it_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_state(run).word == RUNNING and opened(run).alive()
    assert "in Slurm job 26" in opened(run).description
    write_ending(run, AttemptEnding(Ending.STOPPED, "prorl-hpc stop", time.time()))
    assert run_state(run).word == STOPPED and not opened(run).alive()
    run.ending_file.unlink()
    says(monkeypatch, JobReports())
    assert not opened(run).alive()
    says(monkeypatch, JobReports(trouble="squeue failed"))
    with pytest.raises(RunError, match="in Slurm job 26 cannot be looked for: squeue failed"):
        opened(run).alive()


def test_a_shell_on_its_node_is_a_step_of_that_job(run: RunDirectory) -> None:
    words = attach_words(run, PlacedNode(0, "rollout", "cpu07", 0), None)
    assert words[:3] == ["srun", "--jobid=26", "--overlap"] and "--pty" in words


def test_the_job_of_others_work_is_not_cancelled_for_it(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="`scancel 26` ends as a whole"):
        opened(run).cancel()


def test_the_job_around_a_local_run_is_recorded(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "moon")
    assert Job.submitted(run, "local", "1").record.enclosing == "31"
    assert (opened(run).record.cluster, opened(run).ids) == ("moon", ("1", "31"))
    assert not opened(run).is_inside_another_job()
    assert Job.submitted(run, "slurm", "32").record.enclosing == ""
