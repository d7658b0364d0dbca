"""logs: which ones, of which attempt, and followed through a requeue to the end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.cli.log_follower import LogFollower
from prorl_hpc.cli.log_names import wanted_names
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import JobRecord


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with one attempt and the logs of six writers, each with one line."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "day" / "demo-abc123")
    for directory in (run.attempts, run.jobs):
        directory.mkdir(parents=True)
    run.config_file.touch()
    run = run.begin_attempt(1)
    for name in ("worker-10", "worker-2", "coordinator", "trainer-0", "node-0", "launcher", "srun-0"):
        (run.logs / f"{name}.log").write_text(f"this is {name}\n")
    write_json(run.jobs / "job.json", JobRecord("slurm", "7", "host", 0, time.time(), 1))
    (run.jobs / "7_0_log.out").write_text("batch\n")
    (run.jobs / "7_0_log.err").touch()
    return run


def test_all_logs_in_an_order_that_people_expect(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run.path)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("==>")]
    order = ["coordinator", "worker-2", "worker-10", "trainer-0", "node-0", "launcher", "srun-0", "job"]
    assert shown == [f"==> {name} <==" for name in order]


@pytest.mark.parametrize(
    ("component", "names"),
    [
        ("worker", ["worker-2", "worker-10"]),
        ("worker-2", ["worker-2"]),
        ("rollout", ["coordinator", "worker-2", "worker-10"]),
        ("trainer", ["trainer-0"]),
        ("job", ["job"]),
    ],
)
def test_components(run: RunDirectory, capsys: pytest.CaptureFixture[str], component: str, names: list[str]) -> None:
    assert main(["logs", "-n1", "--component", component, run.run_id]) == 0
    out = capsys.readouterr().out
    said = ["batch" if name == "job" else f"this is {name}" for name in names]
    assert [line for line in out.splitlines() if not line.startswith("==>")] == said


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--component", "trainr-0"], "did you mean trainer-0?"),
        (["--component", "moon"], "components: rollout, inference, trainer, coordinator"),
        (["--attempt", "9"], "has the attempts 1"),
        (["nowhere/run"], "nowhere/run is not there"),
        (["runs"], "runs is not a run directory: it has no config.yaml"),
        (["worker-0"], "--component worker-0"),
    ],
)
def test_what_is_not_there_is_named_for_what_it_is(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:
    if words[0].startswith("--"):
        words = [*words, str(run.path)]
    assert main(["logs", *words]) == 2
    assert answer in capsys.readouterr().err


def test_an_earlier_attempt(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.begin_attempt(2).logs / "worker-2.log").write_text("second\n")
    assert main(["logs", "-c", "worker-2", str(run.path)]) == 0
    assert main(["logs", "-c", "worker-2", "--attempt", "1", str(run.path)]) == 0
    assert capsys.readouterr().out == "second\nthis is worker-2\n"


def test_following_goes_through_a_requeue_to_the_end(run: RunDirectory) -> None:
    """The controller of this run does not answer, so that it counts as living until its ending is written."""
    command = [
        sys.executable,
        "-m",
        "prorl_hpc",
        "logs",
        "-f",
        "-n1",
        "-c",
        "worker-2",
        "-c",
        "worker-3",
        str(run.path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": "/nowhere"}) as following:
        assert following.stdout is not None
        watchdog = threading.Timer(60, following.kill)
        watchdog.start()

        def say(attempt: RunDirectory, name: str, text: str) -> None:
            with (attempt.logs / f"{name}.log").open("a") as log:
                log.write(text)

        lines = iter(following.stdout.readline, "")
        assert next(lines) == "this is worker-2\n"
        say(run, "worker-2", "one\n")
        assert next(lines) == "one\n"
        say(run, "worker-3", "new\nhalf")
        assert next(lines) == "worker-3 | new\n"
        write_ending(run, AttemptEnding(Ending.SUSPENDED, "time limit", 0.0, goes_on=True))
        second = run.begin_attempt(2)
        say(second, "worker-2", "again\n")
        assert [next(lines) for _ in range(3)] == ["worker-3 | half\n", "--- attempt 2 ---\n", "again\n"]
        say(second, "worker-2", "the last words")
        write_ending(second, AttemptEnding(Ending.FINISHED, "", 0.0))
        assert list(lines) == ["the last words\n"]
        assert following.wait(20) == 0
        watchdog.cancel()


def test_only_whole_lines_until_the_end(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    log = run.logs / "worker-2.log"
    follower = LogFollower(["worker-2"], {log: log.stat().st_size})
    with log.open("a") as file:
        file.write("a\nhal")
    follower.print_new(run, last=False)
    assert capsys.readouterr().out == "a\n"
    follower.print_new(run, last=True)
    assert capsys.readouterr().out == "hal\n"


def test_a_component_that_a_living_run_may_still_get() -> None:
    assert wanted_names(["worker-7"], ["worker-0"], living=True) == []
    with pytest.raises(ConfigError):
        wanted_names(["wroker-7"], ["worker-0"], living=True)
