"""What ends a view of a run, and what of it ends the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.cli import following
from prorl_hpc.cli.following import QueueReason, View, follow_to_the_end
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.job import Job, JobRecord
from prorl_hpc.slurm.run_states import RUNNING, WAITING, RunState


class SignallingJob(Job):
    """Lives until it is cancelled; when it is asked for the first time, ``came`` reaches this process."""

    def __init__(self, kind: str, came: signal.Signals | None = None) -> None:
        super().__init__(JobRecord(kind, "17", "here", 0, time.time(), 1))
        self._came, self.cancelled, self.in_queue = came, False, False

    def alive(self) -> bool:
        if self._came is not None:
            came, self._came = self._came, None
            os.kill(os.getpid(), came)
        return not self.cancelled

    def waiting(self) -> bool:
        return self.in_queue

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout_s: float) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    run = RunDirectory.create(config)
    run.begin_attempt(1)
    return run


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of pytest come back; the end of a run is not waited for."""
    before = {number: signal.getsignal(number) for number in following.ENDING}
    monkeypatch.setattr(following, "STOP_LIMIT_S", following.CANCEL_S)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("kind", "came", "view"),
    [
        ("slurm", signal.SIGINT, View(interrupted=True)),
        ("slurm", signal.SIGTERM, View(left=143)),
        ("slurm", signal.SIGHUP, View(left=129)),
        ("local", signal.SIGINT, View(interrupted=True)),
        ("local", signal.SIGTERM, View(interrupted=True)),
        ("local", signal.SIGHUP, View(interrupted=True)),
    ],
)
def test_only_ctrl_c_ends_a_slurm_job_and_every_signal_a_run_on_this_machine(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], kind: str, came: signal.Signals, view: View
) -> None:
    job = SignallingJob(kind, came)
    assert follow_to_the_end(run, ProrlConfig(), job) == view
    assert (job.cancelled, run.stop_marker.exists()) == (view.interrupted, view.interrupted)
    told = capsys.readouterr().err
    if view.left:
        assert f"{came.name}: only this view ends, Slurm job 17 goes on" in told
        assert f"stop: prorl-hpc stop {run.path}" in told


def test_a_job_that_waits_says_why_and_slurm_is_not_asked_at_every_look(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunDirectory] = []

    def state(run: RunDirectory) -> RunState:
        asked.append(run)
        return RunState(WAITING, "Resources, expected to start 2030-01-02 12:00:00")

    monkeypatch.setattr("prorl_hpc.slurm.run_states.run_state", state)
    job = SignallingJob("slurm")
    reason = QueueReason(run, job)
    assert reason() == ""
    job.in_queue = True
    told = "Slurm job 17 waits in the queue: Resources, expected to start 2030-01-02 12:00:00"
    assert [reason(), reason()] == [told, told]
    assert len(asked) == 1
    job.in_queue = False
    assert reason() == ""


def test_what_is_no_reason_to_wait_is_not_told_as_one(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began between the two questions."""
    monkeypatch.setattr("prorl_hpc.slurm.run_states.run_state", lambda run: RunState(RUNNING, "its job is CONFIGURING"))
    job = SignallingJob("slurm")
    job.in_queue = True
    assert QueueReason(run, job)() == "Slurm job 17 waits in the queue"
