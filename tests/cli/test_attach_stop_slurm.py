"""attach, stop and status on real Slurm: a heterogeneous job of fake processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.runs import fake_config, fake_plan, fake_run, processes_of
from ptyprocess import PtyProcess

from prorl_hpc.__main__ import main
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop, read_ending
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.run_states import run_state

pytestmark = pytest.mark.slurm
NAMES = ["coordinator", "worker-0", "worker-1", "inference-0", "trainer-0"]


@pytest.fixture(autouse=True)
def on_the_cluster(slurm_mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def is_ready(run: RunDirectory) -> bool:
    assert read_failure(run) is None, read_failure(run)
    files = [run.process_state(name) for name in NAMES]
    return all(file.exists() and '"ready"' in file.read_text() for file in files)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """All processes of the first attempt are ready."""
    config = fake_config(tmp_path, slurm=True)
    config.run.drain_s = 1.0
    run = fake_run(config, {})
    job = submit(run, config, fake_plan(config))
    try:
        wait_for(lambda: is_ready(run))
        yield run
    finally:
        job.cancel()
        job.wait(60)


def attach(run: RunDirectory, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prorl_hpc", "attach", str(run.path), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_command_on_every_component(run: RunDirectory) -> None:
    tell = 'echo "$PRORL_NODE_RANK $PRORL_ATTEMPT $SLURMD_NODENAME $PRORL_RUN_DIR $PWD"; ls'
    seen = set()
    for target, socket in (("rollout", "worker-0"), ("inference-0", "inference-0"), ("trainer", "trainer-0")):
        done = attach(run, target, "--command", tell)
        assert done.returncode == 0, done.stderr
        (rank, attempt, node, directory, place), *files = [line.split() for line in done.stdout.splitlines()]
        assert (attempt, directory) == ("1", str(run.path))
        assert place.startswith("/tmp/prorl-")
        assert [f"{socket}.sock"] in files
        seen.add((rank, node))
    assert len(seen) == 3
    assert attach(run, "worker-1", "-c", "exit 7").returncode == 7
    refused = attach(run, "trainr-0", "-c", "true")
    assert refused.returncode == 2
    assert "did you mean trainer-0?" in refused.stderr
    assert is_ready(run)


def test_a_shell_is_a_terminal_and_leaves_the_run_alone(run: RunDirectory) -> None:
    environment = {**os.environ, "SHELL": "/bin/sh", "PS1": "on-node> "}
    words = [sys.executable, "-m", "prorl_hpc", "attach", str(run.path), "inference-0"]
    terminal = PtyProcess.spawn(words, env=environment)
    terminal.write(b"test -t 0 && echo $((40 + 2)) on $SLURM_JOB_ID-$PRORL_NODE_RANK; exit 5\n")
    said = b""
    try:
        while True:
            said += terminal.read(4096)
    except EOFError:
        pass
    assert b"42 on " in said, said
    assert terminal.wait() == 5
    assert is_ready(run)


def test_status_tells_time_left_and_stop_drains(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["status"], status["job_state"], status["attempt"]) == ("running", "RUNNING", 1)
    assert 0 < status["left_s"] <= 300
    assert main(["stop", str(run.path)]) == 0
    ending = read_ending(run)
    assert ending is not None
    assert (ending.ending, ending.reason) == (Ending.STOPPED, "prorl-hpc stop")
    assert run_state(run).word == "stopped"
    assert processes_of(run) == []
    assert main(["stop", str(run.path)]) == 0
    assert "does not run: it is stopped" in capsys.readouterr().out
    assert attach(run, "-c", "true").returncode == 1


def test_a_requeued_run_is_stopped_for_good(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job.open(run)
    assert job is not None
    subprocess.run(["scontrol", "requeuehold", job.record.job_id], check=True)
    wait_for(lambda: run_state(run).word == "suspended")
    assert main(["stop", str(run.path)]) == 0
    assert run_state(run).word == "stopped"
    assert job.state(now=True) == "CANCELLED"
    ending = read_ending(run)
    assert ending is not None
    assert ending.ending is Ending.STOPPED
    assert "then prorl-hpc stop" in ending.reason


def test_a_run_that_waits_is_cancelled_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.cluster.extra = {"begin": "now+1hour"}
    run = fake_run(config, {})
    job = submit(run, config, fake_plan(config))
    state = run_state(run)
    assert state.word == "waiting"
    wait_for(lambda: "BeginTime" in run_state(run).detail)
    assert "expected to start" in run_state(run).detail
    assert main(["stop", str(run.path)]) == 0
    assert "not gone yet" not in capsys.readouterr().out
    assert job.state(now=True) == "CANCELLED"
    assert run_state(run).word == "stopped"


def test_now_hurries_a_run_that_drains(run: RunDirectory) -> None:
    order_stop(run, StopOrder(Ending.SUSPENDED, "the allocation ends soon", drain_s=600.0))
    assert run_state(run).word == "draining"
    assert main(["stop", str(run.path), "--now"]) == 0
    assert run_state(run).word == "stopped"
    assert processes_of(run) == []
