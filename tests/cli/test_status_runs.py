"""status: many runs with one call to Slurm, with and without accounting, and one run in full."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.endings import AttemptEnding, Ending, ProcessEnd, StopOrder, order_stop, write_ending
from prorl_hpc.slurm.job import JobRecord
from prorl_hpc.slurm.run_index import all_runs, register_run
from prorl_hpc.slurm.run_states import run_states
from prorl_hpc.slurm.states import job_reports


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without runs, in a directory without any."""
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return tmp_path


class FakeSlurm:
    """squeue and sacct on PATH; each call leaves a line in ``calls``."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.calls_file = directory / "calls"
        self.says("squeue", "")
        self.says("sacct", "", code=1)

    def says(self, program: str, answer: str, code: int = 0, error: str = "") -> None:
        (self.bin / f"{program}.out").write_text(answer)
        script = f"#!/bin/sh\necho {program} >>{self.calls_file}\ncat {self.bin}/{program}.out\necho '{error}' >&2\nexit {code}\n"
        (self.bin / program).write_text(script)
        (self.bin / program).chmod(0o755)

    def calls(self, program: str) -> int:
        return self.calls_file.read_text().split().count(program) if self.calls_file.exists() else 0


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(home)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


def make_run(home: Path, job_id: int | None, kind: str = "slurm", name: str = "demo") -> RunDirectory:
    run = RunDirectory(home / "runs" / "2026-01-01" / f"{name}-{secrets.token_hex(3)}")
    for directory in (run.attempts, run.jobs):
        directory.mkdir(parents=True)
    run.begin_attempt(1)
    run.config_file.write_text("run: {}\n")
    if job_id is not None:
        write_json(run.jobs / "job.json", JobRecord(kind, str(job_id), "elsewhere", 0, time.time(), 1))
    register_run(run)
    return run


def ended(run: RunDirectory, ending: Ending, reason: str = "because", **more: Any) -> RunDirectory:
    write_ending(run, AttemptEnding(ending, reason, time.time(), **more))
    return run


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["status", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_hundred_runs_take_one_call_a_cycle(
    home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(home, 1000 + 2 * number) for number in range(200)]
    for run in runs[:150]:
        ended(run, Ending.FINISHED)
    slurm.says(
        "squeue", "".join(f"{1000 + 2 * n}|RUNNING|None|2026-01-01T00:00:00|1-00:00:01\n" for n in range(150, 200))
    )
    rows = told(capsys, "--all")["runs"]
    assert (slurm.calls("squeue"), slurm.calls("sacct")) == (1, 0)
    assert [row["status"] for row in rows].count("running") == 50
    assert [row["status"] for row in rows].count("finished") == 150
    running = next(row for row in rows if row["status"] == "running")
    assert running["left_s"] == 86401.0
    shown = told(capsys)
    assert (len(shown["runs"]), shown["more"]) == (20, 180)
    assert slurm.calls("squeue") == 2


def test_runs_that_are_over_need_no_call(home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    for ending in (Ending.FINISHED, Ending.FAILED, Ending.STOPPED):
        ended(make_run(home, 7), ending)
    assert sorted(row["status"] for row in told(capsys)["runs"]) == ["failed", "finished", "stopped"]
    assert slurm.calls("squeue") == 0


def test_every_word(home: Path, slurm: FakeSlurm) -> None:
    waiting, running, draining, going_on = (make_run(home, job) for job in (10, 20, 30, 40))
    crashed, dropped, gone, cancelled = (make_run(home, job) for job in (50, 60, 70, 80))
    unsubmitted = make_run(home, None)
    order_stop(draining, StopOrder(Ending.STOPPED, "enough"))
    ended(going_on, Ending.SUSPENDED, "time limit", goes_on=True)
    (crashed.state / "coordinator.json").write_text("{}")  # the node crashed: no ending, back in the queue
    ended(dropped, Ending.SUSPENDED, "time limit", goes_on=True)  # and then scancel while it waited
    order_stop(cancelled, StopOrder(Ending.STOPPED, "no more"))
    slurm.says(
        "squeue",
        "10+0|PENDING|Priority|2026-02-01T10:00:00|1:00:00\n10+1|PENDING|Resources|N/A|1:00:00\n"
        "20+0|COMPLETED|None|2026-01-01T00:00:00|0:00\n20+1|RUNNING|None|2026-01-01T00:00:00|30:00\n"
        "30|RUNNING|None|2026-01-01T00:00:00|2:00\n40|PENDING|BeginTime|N/A|1:00\n50|PENDING|None|N/A|1:00\n"
        "60|CANCELLED|None|N/A|0:00\n",
    )
    runs = [waiting, running, draining, going_on, crashed, dropped, gone, cancelled, unsubmitted]
    states = run_states(runs)
    words = [
        "waiting",
        "running",
        "draining",
        "suspended",
        "suspended",
        "suspended",
        "ended",
        "stopped",
        "not submitted",
    ]
    assert [state.word for state in states] == words
    assert states[0].detail == "Priority, expected to start 2026-02-01 10:00:00"
    assert states[2].detail == "enough (stops)"
    assert states[1].report is not None and states[1].report.left_s == 0.0
    assert "without a word" in states[6].detail
    assert [state.living for state in states[3:6]] == [True, True, False]
    assert states[5].detail == "time limit; job 60 was cancelled; `prorl-hpc resume` goes on"


def test_accounting_tells_what_the_controller_forgot(home: Path, slurm: FakeSlurm) -> None:
    run = make_run(home, 90)
    slurm.says("sacct", "90+0|NODE_FAIL\n90+1|CANCELLED by 0\n")
    slurm.says("squeue", "", code=1, error="slurm_load_jobs error: Invalid job id specified")
    (state,) = run_states([run])
    assert (state.word, state.job_state) == ("ended", "NODE_FAIL")


@pytest.mark.parametrize("damage", ["", "{}", "[", '{"kind": "slurm"}', "not a number", "latest is a directory"])
def test_a_damaged_run_hides_no_other(
    home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    slurm.says("squeue", "".join(f"{job}|RUNNING|None|N/A|1:00\n" for job in (3, 4)))
    others, damaged = make_run(home, 3), make_run(home, 4)
    record = damaged.jobs / "job.json"
    if damage.startswith("latest"):  # copied by a program that follows links
        (damaged.attempts / "latest").unlink()
        (damaged.attempts / "latest").mkdir()
    elif damage.startswith("not"):
        write_json(record, JobRecord("slurm", "3,5", "elsewhere", 0, time.time(), 1))
    else:
        record.write_text(damage)
    rows = {row["id"]: row for row in told(capsys)["runs"]}
    assert rows[others.run_id]["status"] != "unknown"
    row = rows[damaged.run_id]
    if not damage.startswith("latest"):
        assert (row["status"], row["job"]) == ("unknown", None)
        assert "job.json" in row["detail"]
    assert main(["status"]) == 0
    assert main(["status", damaged.run_id]) == 0


def test_a_run_without_its_state_hides_no_other(home: Path, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "3|PENDING|Priority|N/A|N/A|\n")
    run, other = make_run(home, 3), ended(make_run(home, 5), Ending.FAILED)
    run.state.rmdir()
    assert [state.word for state in run_states([run, other])][1] == "failed"


@pytest.mark.parametrize("watch", ["nan", "inf", "0", "1e-7", "-1"])
def test_the_controller_is_not_asked_without_pause(
    home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], watch: str
) -> None:
    assert main(["status", "--watch", watch]) == 2
    assert "give seconds from 1" in capsys.readouterr().err
    assert slurm.calls("squeue") == 0


def test_a_controller_that_does_not_answer_leaves_live_runs_unknown(home: Path, slurm: FakeSlurm) -> None:
    done, living = ended(make_run(home, 1), Ending.FINISHED), make_run(home, 2)
    slurm.says("squeue", "", code=1, error="slurm_load_jobs error: Unable to contact slurm controller")
    states = run_states([done, living])
    assert [state.word for state in states] == ["finished", "unknown"]
    assert "Unable to contact" in states[1].detail


def test_no_slurm_at_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reports = job_reports(["5"])
    assert "no squeue" in reports.trouble
    assert reports.of("5") is None
    assert run_states([make_run(home, 5)])[0].word == "unknown"


def test_a_local_run_of_another_machine_is_unknown_until_it_has_ended(home: Path) -> None:
    run = make_run(home, 4711, kind="local")
    assert run_states([run])[0].word == "unknown"
    assert run_states([ended(run, Ending.FAILED)])[0].word == "failed"


def test_watching_asks_once_a_cycle_until_interrupted(home: Path, slurm: FakeSlurm) -> None:
    for job in (3, 4, 5):
        make_run(home, job)
    command = [sys.executable, "-m", "prorl_hpc", "status", "--watch", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        lines = [watch.stdout.readline() for _ in range(3)]
        watch.send_signal(signal.SIGINT)
        lines += watch.stdout.read().splitlines()
        assert watch.wait(20) == 130
    assert len(json.loads(lines[0])["runs"]) == 3
    assert slurm.calls("squeue") - len(lines) in (0, 1)  # the last cycle may have been cut off


def test_one_run_in_full(home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home, 12)
    ended(run, Ending.SUSPENDED, "the allocation ends soon", goes_on=True, steps=3)
    second = run.begin_attempt(2)
    ends = [
        ProcessEnd("worker-0", "n1", 0, "was told to stop"),
        ProcessEnd("trainer-0", "n2", -9, "was killed by SIGKILL"),
    ]
    write_ending(second, AttemptEnding(Ending.FAILED, "trainer-0 died", time.time(), exit_code=1, processes=ends))
    (run.path / "metrics.jsonl").write_bytes(msgspec.json.encode({"kind": "step", "step": 3, "reward": 0.5}) + b"\n")
    assert main(["status", run.run_id]) == 0
    shown = capsys.readouterr().out
    for words in (
        "suspended, went on",
        "the allocation ends soon",
        "trainer-0 died",
        "-9",
        "was killed by SIGKILL",
        "attempt 2",
    ):
        assert words in shown, words
    assert shown.index("SIGKILL") < shown.index("was told to stop")
    full = told(capsys, run.run_id)
    assert (full["status"], full["step"], full["reward"], full["attempt"]) == ("failed", 3, 0.5, 2)
    assert [a["ending"] for a in full["attempts"]] == ["suspended", "failed"]
    assert full["process_ends"][1]["exit_code"] == -9
    assert main(["status"]) == 0
    assert run.run_id in capsys.readouterr().out


def test_the_index_drops_what_is_gone(home: Path, slurm: FakeSlurm) -> None:
    kept, lost = make_run(home, None), make_run(home, None)
    assert {run.path for run in all_runs()} == {kept.path, lost.path}
    assert (home / "home" / "runs").stat().st_mode & 0o777 == 0o700
    lost.path.rename(home / "elsewhere")
    assert [run.path for run in all_runs()] == [kept.path]
    assert not (home / "home" / "runs" / lost.run_id).is_symlink()
    register_run(kept)
    assert len(all_runs()) == 1


def test_an_entry_on_storage_that_is_away_stays(home: Path, slurm: FakeSlurm) -> None:
    run = make_run(home, None)
    entry = home / "home" / "runs" / run.run_id
    entry.unlink()
    entry.symlink_to("/nowhere/project/runs/2026-01-01/demo-aaaaaa")
    assert all_runs() == []
    assert entry.is_symlink()


def test_two_runs_of_one_name_are_both_kept(home: Path, slurm: FakeSlurm) -> None:
    run = make_run(home, None)
    twin = RunDirectory(home / "other" / "runs" / "day" / run.run_id)
    twin.path.mkdir(parents=True)
    twin.config_file.write_text("run: {}\n")
    register_run(twin)
    assert {r.path for r in all_runs()} == {run.path, twin.path}


def test_a_run_is_stopped_only_if_somebody_stopped_it(home: Path, slurm: FakeSlurm) -> None:
    queued, leaving, preempted, wanted = (make_run(home, job) for job in (11, 12, 13, 14))
    order_stop(leaving, StopOrder(Ending.SUSPENDED, "SIGTERM from Slurm"))  # killed before it could record its end
    ended(preempted, Ending.SUSPENDED, "SIGTERM from Slurm")
    order_stop(wanted, StopOrder(Ending.STOPPED, "prorl-hpc stop"))
    slurm.says("squeue", "".join(f"{job}|CANCELLED|None|N/A|0:00\n" for job in (11, 12, 14)))
    states = run_states([queued, leaving, preempted, wanted])
    assert [state.word for state in states] == ["stopped", "suspended", "suspended", "stopped"]
    assert not any(state.living for state in states)
    assert states[0].detail == "job 11 was cancelled"
    assert states[1].detail == "SIGTERM from Slurm; job 12 was cancelled; `prorl-hpc resume` goes on"
    assert states[2].detail == "SIGTERM from Slurm; job 13 is gone; `prorl-hpc resume` goes on"


def test_a_lost_node_is_shown_at_once(home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home, 15)
    slurm.says("squeue", "15|RUNNING|None|2026-01-01T00:00:00|1:00:00\n")
    write_json(run.placement_file, [{"rank": 0, "host": "gpu01"}, {"rank": 1, "host": "cpu07"}])
    (run.state / "node-1.lost").touch()
    full = told(capsys, run.run_id)
    assert (full["lost_nodes"], full["attempts"][0]["lost_nodes"]) == (["cpu07"], ["cpu07"])
    assert main(["status", run.run_id]) == 0
    assert "lost: cpu07" in capsys.readouterr().out


def test_the_runs_of_a_sweep_are_told_apart(home: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["cluster=slurm", "run.name=sweep"]
    for rate, seed in (("1e-5", "1"), ("1e-6", "1")):
        run = ended(make_run(home, 1, name="sweep"), Ending.FINISHED)
        own = [f"trainer.learning_rate={rate}", f"run.seed={seed}"]
        write_json(run.path / "environment.json", {"overrides": [*common, *own], "host": "n1"})
    ended(make_run(home, 2, name="alone"), Ending.FINISHED)
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "  learning_rate=1e-5  because" in shown
    assert "  learning_rate=1e-6  because" in shown
    assert "seed" not in shown
    assert "cluster=slurm" not in shown
    rows = {row["id"]: row for row in told(capsys)["runs"]}
    assert [row["overrides"] for row in rows.values()].count([]) == 1
