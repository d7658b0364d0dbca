"""attach to a run on this machine, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.cli.stop import stop_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.job import Job


def attach(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prorl_hpc", "attach", *words]
    environment = {**os.environ, "SHELL": "/bin/sh"}
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    config = fake_config(tmp_path)
    run = fake_run(config, {})
    submit(run, config, fake_plan(config))
    (tmp_path / "runs" / "latest").symlink_to(run.path)
    deadline = time.monotonic() + 60
    while not run.process_state("trainer-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield run
    stop_run(run, drain_s=0.0)
    assert processes_of(run) == []


def test_a_command_beside_a_local_run(run: RunDirectory, tmp_path: Path) -> None:
    tell = 'echo "$PRORL_RUN_ID $PRORL_NODE_RANK"; test "$PWD" = "$PRORL_RUNTIME_DIR" && cat owner'
    done = attach("latest", "worker-0", "--command", tell, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{run.run_id} 0\nrun={run.run_id}\n")
    assert attach("worker-0", "-c", "echo $PRORL_ATTEMPT", cwd=tmp_path).stdout == "1\n"
    no_terminal = attach(str(run.path), cwd=tmp_path)
    assert no_terminal.returncode == 2
    assert "--command" in no_terminal.stderr
    assert "there are: " in attach(str(run.path), "moon", "-c", "true", cwd=tmp_path).stderr
    job = Job.open(run)
    assert job is not None
    assert job.alive()


def test_clean_leaves_a_living_run_alone_whatever_the_clock_says(run: RunDirectory, tmp_path: Path) -> None:
    runtime = run.runtime_dir(run.load_config().run.runtime_root)
    os.utime(runtime / "owner", (1, 1))
    environ = {**os.environ, "PRORL_HOME": str(tmp_path / "an index without it")}
    command = [sys.executable, "-m", "prorl_hpc", "clean", "--root", str(runtime.parent), "--dry-run"]
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=60)
    assert f"keeping {runtime} of {run.run_id}: its process" in done.stdout, done.stdout + done.stderr
