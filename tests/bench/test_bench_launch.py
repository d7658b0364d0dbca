"""`bench launch`: its parts in small, and its sums."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.bench import launch, launch_answers, launch_cluster, launch_demo, launch_watch
from prorl_hpc.bench.counting_trainer import StepNote, read_steps
from prorl_hpc.bench.launch_marks import Marks, allocated_at, mark_line
from prorl_hpc.bench.launch_requeues import Outcome, figures
from prorl_hpc.bench.noted_task import read_notes
from prorl_hpc.bench.submit_run import with_modules
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.plan import make_plan


def silent(words: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("name", ["launch --help", "launch --dry-run", "launch cluster=slurm --dry-run", "status"])
def test_the_verbs_load_nothing_heavy(name: str, tmp_path: Path) -> None:
    launch_answers.furnish(tmp_path)
    assert launch_answers.heavy_modules(launch_answers.verbs(tmp_path)[name], tmp_path) == []


def test_heavy_modules_are_seen(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    words = launch_answers.Asked(("-c", "import sys; sys.path.insert(0, ''); import torch"))
    assert launch_answers.heavy_modules(words, tmp_path) == ["torch"]


def test_a_look_at_all_runs_is_one_call() -> None:
    calls, time = launch_watch.measure(4, 3, silent)
    assert (calls.value, calls.holds) == (1, True), calls.detail
    assert time.value is not None  # CPU time is counted in hundredths of a second: of few runs it may be none


def test_without_root_the_cluster_figures_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cluster, "missing", lambda kind: f"{kind} nodes need root")
    parts = ["start", "requeues"]
    found = launch.measure(parts, True, silent)
    assert [(figure.name, figure.value, figure.holds) for figure in found] == [(part, None, None) for part in parts]
    assert all("namespaced nodes need root" in figure.detail for figure in found)


def run_of(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path)
    run = RunDirectory.create(config)
    write_json(run.plan_file, make_plan(config))
    return run


def test_marks_count_from_the_first_instruction_of_the_attempt(tmp_path: Path) -> None:
    run = run_of(tmp_path).begin_attempt(2)
    file = tmp_path / "marks"
    file.write_text(
        "1000.0 restarts= step=\n1001.0 restarts= step=0\n"
        "2000.0 restarts=1 step=\n2000.5 restarts=1 step=1\n2000.7 restarts=1 step=0\n"
    )
    (run.logs / "launcher.log").write_text("1970-01-01 00:00:00,250 INFO    attempt 2\nlater\n")
    (run.state / "node-0.up").touch()
    os.utime(run.state / "node-0.up", (2001.0, 2001.0))
    for name, phase in (("worker-0", Phase.READY), ("coordinator", Phase.STARTING)):
        state = ProcessState(name, name.split("-")[0], "n", 1, phase, updated=2003.0)
        write_json(run.process_state(name), state)
    marks = Marks(file, run)
    times = marks.since_first()
    assert marks.first == 2000.0
    assert {what: round(at, 3) for what, at in times.items() if what != "launcher"} == {
        "steps": 0.7,
        "supervisors": 1.0,
        "worker ready": 3.0,
    }


def test_the_mark_is_what_a_shell_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    for name in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "a file"
    assert (
        os.waitstatus_to_exitcode(os.system(f"bash -c {json.dumps(mark_line(file)).replace('$', chr(92) + '$')}")) == 0
    )
    assert Marks(file, run).first > 1e9


def test_the_controller_says_when_it_allocated(tmp_path: Path) -> None:
    log = tmp_path / "slurmctld.log"
    log.write_text(
        "[1970-01-01T10:00:00.000] sched/backfill: _start_job: Started JobId=7+0(7) in cpu on cpu01\n"
        "[1970-01-01T10:00:00.100] sched/backfill: _start_job: Started JobId=7+1(8) in gpu on gpu01\n"
        "[1970-01-01T10:00:09.500] sched/backfill: _start_job: Started JobId=7+0(7) in cpu on cpu01\n"
    )
    assert allocated_at(log, "7", 2) - allocated_at(log, "7", 1) == pytest.approx(9.5)


def test_modules_are_replaced_by_role() -> None:
    plan = with_modules(make_plan(ProrlConfig()), {"trainer": "other"})
    assert {p.role: p.module for p in plan.processes} == {
        "coordinator": "rollout",
        "worker": "worker",
        "inference": "inference",
        "trainer": "other",
    }


def test_notes_that_are_half_written_wait(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    assert read_notes(file) == []
    file.write_text('{"time":1.0,"attempt":1,"rollout_id":"a"}\n{"time":2')
    assert [note.rollout_id for note in read_notes(file)] == ["a"]


def outcome(**changed: Any) -> Outcome:
    whole = {"trained": Counter({1: 1, 2: 1}), "done": {"a", "b"}, "recorded": Counter({"a": 1, "b": 1}), "begun": 2}
    return Outcome(**{**whole, "ends": ["training is finished"], **changed})


def test_what_is_lost_or_done_twice_is_counted() -> None:
    ends = ["SIGTERM from Slurm", "the allocation ends soon", "training is finished"]
    good = figures(2, outcome(), outcome(ends=ends, begun=4))
    assert [figure.value for figure in good] == [2, 2, 0, 0, 0, 0, 1]
    assert all(figure.holds for figure in good[:-1])
    bad = outcome(ends=ends[1:], done={"a"}, recorded=Counter({"a": 2}), trained=Counter({1: 2}))
    found = {figure.name: figure.value for figure in figures(2, outcome(), bad) if figure.holds is False}
    assert found == {
        "requeues survived": 1,
        "steps trained": 1,
        "steps trained twice": 1,
        "rollouts lost": 1,
        "rollouts recorded twice": 1,
    }


def test_steps_are_read_over_all_attempts(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert read_steps(run) == []
    (run.path / "steps.jsonl").write_text('{"step":1,"attempt":1,"done":["a"],"not_done":[]}\n')
    assert read_steps(run) == [StepNote(1, 1, ["a"], [])]


def demo_run(tmp_path: Path, endings: list[Ending]) -> RunDirectory:
    """Two steps of two groups were ordered; the second's file lacks a group, and one rollout is in both."""
    run = run_of(tmp_path)
    for number, ending in enumerate(endings, start=1):
        reason = "training is finished" if ending is Ending.FINISHED else "the allocation ends soon"
        write_ending(run.begin_attempt(number), AttemptEnding(ending, reason, 0.0))
    store = RolloutStore(run)
    for step, groups in ((1, ["a", "b"]), (2, ["b"])):
        rollouts = {name: RolloutResult(f"{name}.s0", name, 0, "t", Status.DONE, 1.0) for name in groups}
        results = [GroupResult(name, i, GroupOutcome.ACCEPTED, [rollouts[name]]) for i, name in enumerate(groups)]
        progress = BatchProgress(f"step-{step}", BatchState.DONE, 2, 2, 0, 0, 0, 2, 0, 2)
        store.write_batch(f"step-{step}", BatchResult(progress, results, 1.0))
        MetricsLog(run.metrics_file).append({"kind": "step", "step": step, "groups_accepted": 2})
    return run


def test_what_the_demonstration_lost_is_counted(tmp_path: Path) -> None:
    run = demo_run(tmp_path, [Ending.SUSPENDED, Ending.FINISHED])
    found = {figure.name.removeprefix("demo: "): figure.value for figure in launch_demo.figures(1, run)}
    assert found == {
        "requeues survived": 1,
        "steps trained": 2,
        "steps trained twice": 0,
        "batches not whole": 1,
        "rollouts failed": 0,
        "rollouts recorded twice": 1,
    }


def test_a_run_that_did_not_finish_gives_no_figures(tmp_path: Path) -> None:
    run = demo_run(tmp_path, [Ending.SUSPENDED, Ending.FAILED])
    with pytest.raises(RunError, match="ended suspended, failed"):
        launch_demo.figures(1, run)
