"""Which job is a run's: not another one with its id, not another cluster's, not the original's of a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.cluster_name import this_cluster
from prorl_hpc.slurm.job import Job, JobRecord, job_name, strange_jobs
from prorl_hpc.slurm.run_states import ENDED, RUNNING, UNKNOWN, run_state

Says = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    return RunDirectory.create(config)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Says]:
    """Puts a program on PATH that prints a text; scancel notes what it was given in ``cancelled``."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")

    def put(program: str, text: str, *, error: str = "") -> None:
        end = f"echo '{error}' >&2; exit 1" if error else "exit 0"
        (bin_dir / program).write_text(f"#!/bin/sh\n[ -z '{text}' ] || echo '{text}'\n{end}\n")
        (bin_dir / program).chmod(0o755)

    put("squeue", "")
    put("sacct", "")
    put("scontrol", "ClusterName             = here")
    (bin_dir / "scancel").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/cancelled\n")
    (bin_dir / "scancel").chmod(0o755)
    this_cluster.cache_clear()
    yield put
    this_cluster.cache_clear()


def recorded(run: RunDirectory, cluster: str = "here") -> Job:
    write_json(run.jobs / "job.json", JobRecord("slurm", "17", "login", 0, time.time(), 1, cluster, str(run.path)))
    job = Job.open(run)
    assert job is not None
    return job


def test_a_job_of_its_name_is_its_own(run: RunDirectory, says: Says, tmp_path: Path) -> None:
    says("squeue", f"17+0|RUNNING|None|N/A|1:00|{job_name(run)}\n17+1|RUNNING|None|N/A|1:00|other")
    job = recorded(run)
    assert run_state(run).word == RUNNING
    job.cancel()
    assert (tmp_path / "cancelled").read_text() == "17\n"


@pytest.mark.parametrize("name", ["prorl-other-abcdef", "a|b"])
def test_another_job_with_its_id_is_left_alone(run: RunDirectory, says: Says, tmp_path: Path, name: str) -> None:
    says("squeue", f"17|RUNNING|None|N/A|1:00|{name}")
    job = recorded(run)
    assert not job.alive()
    assert run_state(run).word == ENDED
    job.cancel()
    assert not (tmp_path / "cancelled").exists()
    says("squeue", f"17|{name}")
    assert strange_jobs(run, job) == [f"17 ({name})"]  # it may have been renamed


def test_an_earlier_job_that_nobody_wrote_down_is_seen(run: RunDirectory, says: Says) -> None:
    says("squeue", f"16+0|{job_name(run)}\n16+1|bash\n17|{job_name(run)}\n18|bash")
    assert strange_jobs(run, recorded(run)) == [f"16 ({job_name(run)})"]
    says("squeue", "", error="Unable to contact slurm controller")
    with pytest.raises(RunError, match="not known whether"):
        strange_jobs(run, None)


def test_another_clusters_slurm_cannot_say_that_a_job_is_gone(run: RunDirectory, says: Says, tmp_path: Path) -> None:
    says("squeue", "", error="slurm_load_jobs error: Invalid job id specified")
    job = recorded(run, cluster="there")
    state = run_state(run)
    assert state.word == UNKNOWN
    assert "on the cluster there, and this machine's Slurm is here" in state.detail
    with pytest.raises(RunError, match="cannot be cancelled"):
        job.cancel()
    recorded(run, cluster="here")
    assert run_state(run).word == ENDED


def test_a_copy_of_a_run_has_no_job(run: RunDirectory, says: Says, tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        original = Job.submitted(run, "local", str(process.pid))
        shutil.copytree(run.path, tmp_path / "copy" / run.run_id, symlinks=True)
        copy = Job.open(RunDirectory(tmp_path / "copy" / run.run_id))
        assert copy is not None
        copy.cancel()
        assert not copy.alive()
        assert original.alive()
        moved = run.path.rename(tmp_path / "moved")
        job = Job.open(RunDirectory(moved))
        assert job is not None
        assert job.alive()
    finally:
        process.kill()
        process.wait()


def test_a_record_that_does_not_read_is_told_with_what_to_do(run: RunDirectory) -> None:
    (run.jobs / "job.json").write_text("{")
    with pytest.raises(RunError, match=r"job\.json cannot be read .*`squeue --me --name prorl-"):
        Job.open(run)
    assert run_state(run).word == UNKNOWN


def test_a_job_that_cannot_be_written_down_is_cancelled(run: RunDirectory, says: Says, tmp_path: Path) -> None:
    says("squeue", f"17|PENDING|None|N/A|1:00|{job_name(run)}")
    shutil.rmtree(run.jobs)
    with pytest.raises(RunError, match="Slurm job 17 was cancelled"):
        Job.submitted(run, "slurm", "17")
    assert (tmp_path / "cancelled").read_text() == "17\n"
