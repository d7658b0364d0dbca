"""What ends an attempt, and what the attempts before mean: without Slurm."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fakes.runs import fake_config, fake_plan, fake_run

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm import requeueing
from prorl_hpc.slurm.attempt_record import conclude
from prorl_hpc.slurm.earlier_attempts import fence_earlier_attempts, why_not_go_on
from prorl_hpc.slurm.endings import AttemptEnding, Ending, StopOrder, order_stop, read_ending, read_stop, write_ending
from prorl_hpc.slurm.failure import RunFailure, read_failure, record_failure
from prorl_hpc.slurm.launcher_watch import LauncherBeat, LauncherWatch
from prorl_hpc.slurm.requeueing import conclude_job
from prorl_hpc.slurm.steps import PlacedNode


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return fake_run(fake_config(tmp_path, slurm=True), {})


def ended(ending: Ending, steps: int = -1) -> AttemptEnding:
    return AttemptEnding(ending, "told by a test", 0.0, steps=steps)


def test_the_first_order_and_the_first_failure_hold(run: RunDirectory) -> None:
    first = order_stop(run, StopOrder(Ending.STOPPED, "first"))
    assert order_stop(run, StopOrder(Ending.SUSPENDED, "second")) == first == read_stop(run)
    assert record_failure(run, RunFailure("a", "n", "died"))
    assert not record_failure(run, RunFailure("b", "n", "died"))
    assert [path.name for path in run.state.iterdir() if path.name.startswith(".")] == []


def test_marks_without_form_count_too(run: RunDirectory) -> None:
    run.stop_marker.write_text("by hand\n")
    assert read_stop(run) == StopOrder(Ending.STOPPED, "by hand")
    run.stop_marker.write_text('{"ending": "suspended", "reason": "time limit", "drain_s": null}')
    assert read_stop(run) == StopOrder(Ending.STOPPED, "state/STOP is there but does not read as an order")
    run.stop_marker.unlink()
    run.stop_marker.mkdir()
    order = read_stop(run)
    assert order is not None
    assert (order.ending, order.drain_s) == (Ending.STOPPED, 0.0)
    run.failure_file.touch()  # as on a full disk
    failure = read_failure(run)
    assert failure is not None
    assert f"is the disk of {run.path} full?" in failure.headline


def test_what_earlier_attempts_decided_holds_for_the_same_job(run: RunDirectory) -> None:
    assert why_not_go_on(run, []) == ""
    order_stop(run, StopOrder(Ending.SUSPENDED, "the time is up"))
    assert why_not_go_on(run, [1]) == ""
    run.stop_marker.unlink()
    order_stop(run, StopOrder(Ending.STOPPED, "enough"))
    assert why_not_go_on(run, [1]) == "attempt 1 was to stop (enough)"
    assert why_not_go_on(run, []) == ""  # a resume: another job
    write_ending(run, ended(Ending.SUSPENDED))
    assert why_not_go_on(run, [1]) == ""
    write_ending(run, ended(Ending.FINISHED))
    assert why_not_go_on(run, [1]) == "attempt 1 finished the run"


def test_what_is_left_of_earlier_attempts_is_told_to_end(run: RunDirectory) -> None:
    write_ending(run, ended(Ending.SUSPENDED))
    second, third = run.begin_attempt(2), run.begin_attempt(3)
    fence_earlier_attempts(third)
    assert read_stop(RunDirectory(run.path, 1)) is None
    assert read_stop(third) is None
    order = read_stop(second)
    assert order is not None
    assert (order.ending, order.reason) == (Ending.SUSPENDED, "attempt 3 has begun")


@pytest.mark.parametrize(
    ("steps", "goes_on"), [([0, 0], True), ([0, 0, 0], False), ([5, 5, 5], True), ([5] * 4, False)]
)
def test_attempts_that_finish_nothing_end_the_run(tmp_path: Path, steps: list[int], goes_on: bool) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.cluster.requeue_without_progress = 3
    run = fake_run(config, {})
    for number, done in enumerate(steps[:-1], 1):
        write_ending(run.begin_attempt(number), ended(Ending.SUSPENDED, done))
    record = conclude(run.begin_attempt(len(steps)), fake_plan(config), Ending.SUSPENDED, "time", goes_on=True)
    assert record.goes_on is goes_on
    assert (record.ending is Ending.FAILED) is not goes_on


def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """``scontrol`` with that body; returns the file in which each call leaves a line."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\necho x >>{calls}\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(requeueing, "PAUSE_S", 0.0)
    monkeypatch.setattr(requeueing, "ANSWER_S", 5.0)
    return calls


@pytest.mark.parametrize(
    ("script", "calls", "refusal"),
    [
        ("exit 0", 1, ""),
        ("kill -TERM $$", 1, ""),  # the requeue's own signal
        (
            "echo 'Requested operation is presently disabled' >&2; exit 1",
            1,
            "Requested operation is presently disabled",
        ),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", 3, "Unable to contact slurm controller"),
    ],
)
def test_a_job_is_requeued_or_the_refusal_recorded(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, calls: int, refusal: str
) -> None:
    asked = fake_scontrol(tmp_path, monkeypatch, script)
    plan = fake_plan(run.load_config())
    record = conclude_job(run, plan, "7", Ending.SUSPENDED, "the time is up", ["n2"], wanted=True)
    assert asked.read_text().split() == ["x"] * calls
    assert record == read_ending(run)
    assert record.goes_on is not bool(refusal)
    assert record.reason == "the time is up" + (f"; scontrol requeue said: {refusal}" if refusal else "")
    assert record.lost_nodes == ["n2"]


def test_a_job_that_has_gone_on_already_is_not_requeued(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_scontrol(tmp_path, monkeypatch, "exit 0")
    first = RunDirectory(run.path, 1)
    run.begin_attempt(2)
    record = conclude_job(first, fake_plan(run.load_config()), "7", Ending.SUSPENDED, "time", [], wanted=True)
    assert not record.goes_on
    assert not asked.exists()


def test_a_launcher_is_lost_when_slurm_says_so_and_it_is_silent(run: RunDirectory) -> None:
    write_json(run.placement_file, [PlacedNode(0, "rollout", "n1", 0, "7"), PlacedNode(1, "rollout", "n2", 0, "7")])
    beat, hosts = LauncherBeat(run), {"n1", "n2"}
    asked: list[str] = []

    def nodes_of_job(job_id: str) -> set[str]:
        asked.append(job_id)
        return hosts

    beat.beat()
    assert LauncherWatch(run, 60.0, nodes_of_job).lost() is None
    assert asked == []
    silent = LauncherWatch(run, 0.0, nodes_of_job)
    assert silent.lost() is None
    hosts.clear()  # no answer
    assert silent.lost() is None
    hosts.add("n2")
    lost = silent.lost()
    assert lost is not None
    assert (lost.host, lost.job_id, asked) == ("n1", "7", ["7"] * 3)
