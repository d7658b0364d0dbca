from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchProgress, BatchState
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState, RunStatus, ServerStatus, TrainerStatus, WorkerStatus
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.observe.plain_lines import HEARTBEAT_S, PlainLines
from prorl_hpc.observe.progress import follow
from prorl_hpc.observe.restarts import Restart, RestartLog
from prorl_hpc.observe.snapshot import Snapshot, SnapshotReader
from prorl_hpc.observe.wording import clock, sparkline

ROLES = {"coordinator": "coordinator", "worker-0": "worker", "inference-0": "inference", "trainer-0": "trainer"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "demo-ab12cd")
    run.state.mkdir(parents=True)
    return run


def processes(phase: Phase, **details: str) -> list[ProcessState]:
    return [ProcessState(n, r, "node1", 1, phase, details.get(r, "")) for n, r in ROLES.items()]


def write_processes(run: RunDirectory, states: list[ProcessState]) -> None:
    for state in states:
        write_json(run.process_state(state.name), state)


def write_work(run: RunDirectory) -> None:
    write_json(
        run.status_file,
        RunStatus(
            run_id=run.run_id,
            time=0.0,
            uptime_s=60.0,
            rollouts={"done": 40, "failed": 1},
            workers=[WorkerStatus("worker-0", "node1", "apptainer [1.4]", {"init": [1, 4], "run": [32, 32]})],
            servers=[ServerStatus("inference-0", "node1", "vllm", "policy", True, 3, 8, 8, 2, 900, 83.4)],
            batches=[BatchProgress("step-4", BatchState.RUNNING, 4, 2, 3, 1, 5, 40, 1, 6)],
            rollouts_per_s=1.25,
        ),
    )
    write_json(run.trainer_status_file, TrainerStatus("rollouts", 3, 16, 0.0, 0.4, 0.05, 0.05, 481.0))
    log = MetricsLog(run.metrics_file)
    log.append({"kind": "eval", "step": 0, "time": 1.0, "reward": 0.05, "successes": 3, "rollouts": 64})
    for step, reward in enumerate((0.1, 0.25, 0.4), start=1):
        log.append(
            {
                "kind": "step",
                "step": step,
                "time": 10.0 * step,
                "reward": reward,
                "groups_accepted": 4,
                "groups_uniform": 2,
                "seconds": {"rollouts": 12.0, "total": 40.5},
                "idle_fraction": 0.296,
                "staleness": 0.25,
                "staleness_max": 1,
                "groups_stale": int(step == 3),
                "weight_version": step + 1,
            }
        )


def shown(run: RunDirectory, *, terminal: bool, looks: int = 1) -> str:
    """What follow prints in ``looks`` looks at the run."""
    console = Console(file=io.StringIO(), record=True, force_terminal=terminal, width=110, height=50)
    left = iter([True] * (looks - 1))
    follow(run, lambda: next(left, False), poll_s=0.0, console=console)
    return console.export_text()


def test_live_display_while_starting_shows_who_does_what(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.STARTING, inference="loading the model"))
    text = shown(run, terminal=True)
    assert "inference-0" in text and "loading the model" in text and "demo-ab12cd" in text


def test_live_display_of_a_running_run(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.READY))
    write_work(run)
    text = shown(run, terminal=True)
    for part in (
        "32/32",
        "apptainer [1.4]",
        "v3",
        "83",
        "2/4 groups",
        "3 uniform",
        "3/16",
        "8:01",
        "▁▃▄",
        "0.05",
        "40 done",
        "30 % idle, staleness 0.25 (at most 1), 1 too old, weights v4 published",
    ):
        assert part in text, part
    assert "starting" not in text


def test_live_display_shows_restarts_pauses_and_what_drains(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.READY))
    write_work(run)
    down = ProcessState("coordinator", "coordinator", "node1", 1, Phase.STARTING)
    write_json(run.process_state("coordinator"), down)
    for rank, name in enumerate(["coordinator", "worker-7"]):
        restarts = RestartLog(run.restarts_file(rank))
        for count in range(1, 3):
            restarts.append(Restart(name, "node1", "was killed by SIGKILL", count, 3, 10.0 * count + rank))
    status = SnapshotReader(run).read().run
    assert status is not None
    workers = [msgspec.structs.replace(status.workers[0], draining=True)]
    servers = [msgspec.structs.replace(status.servers[0], draining=True)]
    write_json(run.status_file, msgspec.structs.replace(status, paused=True, workers=workers, servers=servers))
    text = shown(run, terminal=True)
    for part in (
        "1 earlier restart",
        "coordinator was killed by SIGKILL: started again (2 of 3)",
        "worker-0 (draining)",
        "inference-0 (draining)",
        "paused: no rollout is started",
        "2/4 groups",
    ):
        assert part in text, part
    lines = shown(run, terminal=False)
    assert "worker-7 was killed by SIGKILL: started again (1 of 3) on node1" in lines


def test_live_display_fits_a_big_run(run: RunDirectory) -> None:
    write_processes(run, [ProcessState(f"worker-{i}", "worker", f"n{i}", 1, Phase.STARTING) for i in range(300)])
    assert "and 292 more" in shown(run, terminal=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_missing_and_half_written_files_are_waited_for(run: RunDirectory, terminal: bool) -> None:
    for content in (b"", b'{"run_id": "x", "ti', b"[]", b"\xff\xfe", b'{"name": 1}', b'{"phase": "dreaming"}'):
        for path in (run.status_file, run.trainer_status_file, run.process_state("worker-0"), run.metrics_file):
            path.write_bytes(content)
        shown(run, terminal=terminal, looks=2)
    run.failure_file.write_text('{"name": "worker-0"}')
    for path in run.state.iterdir():
        path.unlink()
    run.state.rmdir()
    shown(run, terminal=terminal)


def test_plain_lines_say_each_thing_once(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.READY, worker="apptainer 1.4.5"))
    write_work(run)
    text = shown(run, terminal=False, looks=5)
    assert text.count("worker-0 ready on node1: apptainer 1.4.5") == 1
    assert (
        text.count(
            "step 3/16  reward 0.400  groups 4 accepted, 2 uniform, 1 stale  40.5 s (30 % idle, staleness 0.25 (at most 1))  about 8:01 to go"
        )
        == 1
    )
    assert text.count("held-out reward 0.050 (3 of 64) after step 0") == 1
    assert "step 1/16" not in text, "a run joined late starts with the newest step"


def test_follow_returns_when_training_is_finished_and_all_have_ended(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.ENDED))
    run.finished_marker.touch()
    console = Console(file=io.StringIO(), force_terminal=False)
    follow(run, lambda: True, poll_s=0.0, console=console)


def test_steps_that_a_resumed_run_repeats_are_told_again() -> None:
    lines = PlainLines(0.0)
    ready = processes(Phase.READY)

    def step(n: int, time: float) -> dict[str, object]:
        return {"kind": "step", "step": n, "time": time, "reward": 0.5}

    lines.update(Snapshot(ready), 0.0)
    assert len(lines.update(Snapshot(ready, steps=[step(1, 1.0), step(2, 2.0)]), 1.0)) == 2
    again = lines.update(Snapshot(ready, steps=[step(1, 1.0), step(2, 9.0)]), 2.0)
    assert len(again) == 1 and "step 2" in again[0]


def test_heartbeat_only_after_silence() -> None:
    lines = PlainLines(0.0)
    starting = Snapshot(processes(Phase.STARTING, inference="loading the model"))
    assert lines.update(starting, 1.0) == []
    assert lines.update(starting, HEARTBEAT_S - 1) == []
    (line,) = lines.update(starting, HEARTBEAT_S)
    assert "inference-0 (loading the model)" in line
    assert lines.update(starting, HEARTBEAT_S + 1) == []


def test_a_job_that_waits_in_the_queue_is_shown_with_the_reason(run: RunDirectory) -> None:
    """Not as one that is starting."""
    lines, why = PlainLines(0.0), "Slurm job 7 waits in the queue: Resources"
    waiting = Snapshot(waits_for=why)
    assert lines.update(waiting, 1.0) == [f"[   0:01] {why}"]
    assert lines.update(waiting, 2.0) == []
    assert lines.update(waiting, 2.0 + HEARTBEAT_S) == [f"[   0:32] {why}"]
    assert "starting" not in " ".join(lines.update(Snapshot(waits_for="Slurm job 7 waits: Priority"), 40.0))
    assert lines.update(Snapshot(), 41.0) == ["[   0:41] the job waits no longer"]
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    left = iter([True])
    follow(run, lambda: next(left, False), poll_s=0.0, waits_for=lambda: why, console=console)
    assert why in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_failed_process_is_told(run: RunDirectory) -> None:
    lines = PlainLines(0.0)
    (line,) = lines.update(Snapshot([ProcessState("worker-0", "worker", "n", 1, Phase.FAILED, "killed")]), 0.0)
    assert "worker-0 FAILED on n: killed" in line


def test_snapshot_orders_processes_as_they_start(run: RunDirectory) -> None:
    write_processes(run, processes(Phase.READY))
    assert [p.name for p in SnapshotReader(run).read().processes] == list(ROLES)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (481, "8:01"), (3725, "1:02:05"), (-3, "0:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_sparkline_scale_holds_zero_to_one() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 3.0]) == "▁█"
    assert sparkline([]) == "" and len(sparkline([0.1] * 99)) == 40
