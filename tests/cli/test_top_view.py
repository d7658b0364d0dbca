"""top: live on a terminal, left by a key; one plain frame elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ptyprocess import PtyProcess

from prorl_hpc.__main__ import main
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState, RunStatus, ServerStatus, TrainerStatus, WorkerStatus
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import JobRecord

TOP = [sys.executable, "-m", "prorl_hpc", "top"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """In the second attempt, on a Slurm that says that it runs."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho '5|RUNNING|None|N/A|1:02:03'\n")
    squeue.chmod(0o755)
    run = RunDirectory(tmp_path / "runs" / "day" / "demo-abcdef")
    for directory in (run.attempts, run.jobs):
        directory.mkdir(parents=True)
    run.begin_attempt(1)
    run.begin_attempt(2)
    run.config_file.touch()
    write_json(run.jobs / "job.json", JobRecord("slurm", "5", "host", 0, time.time(), 1))
    for name in ("coordinator", "worker-0"):
        state = ProcessState(name, name.partition("-")[0], "n1", 1, Phase.READY)
        write_json(run.process_state(name), state)
    server = ServerStatus("inference-0", "n2", "vllm", "m", True, 3, 4, 4, 0, 100, 250.0)
    worker = WorkerStatus("worker-0", "n1", "apptainer", {"init": [1, 4], "run": [7, 32], "eval": [0, 4]})
    status = RunStatus("demo-abcdef", time.time(), 9.0, {"running": 7, "done": 40}, [worker], [server], [], 1.5)
    write_json(run.status_file, status)
    write_json(run.trainer_status_file, TrainerStatus("rollouts", 3, 16, time.time(), reward=0.25))
    return run


def environment(run: RunDirectory) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{run.path.parents[2] / 'bin'}:{os.environ['PATH']}",
        "TERM": "xterm",
        "COLUMNS": "120",
    }


def test_one_frame_without_a_terminal(run: RunDirectory) -> None:
    done = subprocess.run([*TOP, str(run.path)], env=environment(run), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for words in (
        "running",
        "attempt 2",
        "1:02:03 left",
        "7/32",
        "inference-0",
        "1.50 rollouts/s  250 tokens/s",
        "3/16",
    ):
        assert words in done.stdout, (words, done.stdout)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_a_key_leaves_the_view_and_nothing_else(run: RunDirectory, key: str) -> None:
    before = sorted(run.path.rglob("*"))
    terminal = PtyProcess.spawn([*TOP, "--every", "30", str(run.path)], env=environment(run), dimensions=(40, 120))
    shown = b""
    while b"q leaves this view" not in shown:
        shown += terminal.read(4096)
    terminal.write(key.encode())
    try:
        while True:
            terminal.read(4096)
    except EOFError:
        pass
    assert terminal.wait() == 0
    assert sorted(run.path.rglob("*")) == before


def frame_of(run: RunDirectory) -> str:
    done = subprocess.run([*TOP, str(run.path)], env=environment(run), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_over_has_no_rates_and_no_growing_clock(run: RunDirectory) -> None:
    write_json(run.jobs / "job.json", JobRecord("slurm", "5", "host", 0, time.time() - 5000.0, 1))
    write_json(run.trainer_status_file, TrainerStatus("done", 16, 16, time.time(), eta_s=90.0))
    write_ending(run, AttemptEnding(Ending.FINISHED, "training is finished", time.time() - 4925.0))
    shown = frame_of(run)
    assert "40 done" in shown
    assert "demo-abcdef  1:15" in shown
    for words in ("rollouts/s", "/s", "draining", "q leaves", "to go", "7/32"):
        assert words not in shown, words


def test_an_attempt_that_never_began_waits_for_nobody(run: RunDirectory) -> None:
    third = run.begin_attempt(3)
    write_ending(third, AttemptEnding(Ending.STOPPED, "prorl-hpc stop", time.time()))
    shown = frame_of(run)
    assert "no process of this attempt has reported" in shown
    assert "waiting for" not in shown


@pytest.mark.parametrize("every", ["nan", "inf", "0", "1e-7"])
def test_frames_come_neither_without_pause_nor_never(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], every: str
) -> None:
    assert main(["top", str(run.path), "--every", every]) == 2
    assert "give seconds from 0.1" in capsys.readouterr().err
