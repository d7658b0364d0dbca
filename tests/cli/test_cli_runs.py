"""launch, stop, resume and their endings, as a person at a terminal meets them; the processes are fakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.runs import processes_of
from ptyprocess import PtyProcess

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.job import Job

PROGRAM = [sys.executable, str(Path(__file__).with_name("prorl_with_fakes.py"))]
OVERRIDES = ["model=path", "model.path=/no/model", "trainer.enabled=true", "run.stop_timeout_s=3"]
FINISH = {"trainer-0": {"exit_after": 0.5, "finish": True}}


def acts(**what: Any) -> dict[str, str]:
    return {**os.environ, "FAKE_ACTS": json.dumps({name.replace("_", "-"): act for name, act in what.items()})}


def prorl(*words: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def only_run(cwd: Path) -> RunDirectory:
    (path,) = (p for p in cwd.glob("runs/*/*") if (p / "config.yaml").is_file())
    return RunDirectory.open(path)


def wait_for(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def read_to_end(terminal: PtyProcess) -> str:
    said = b""
    try:
        while True:
            said += terminal.read(4096)
    except EOFError:
        return said.decode(errors="replace")


def all_ready(cwd: Path) -> bool:
    runs = list(cwd.glob("runs/*/*/attempts/latest/state"))
    return bool(runs) and len([p for p in runs[0].glob("*.json") if '"ready"' in p.read_text()]) == 4


def test_a_run_that_finishes(tmp_path: Path) -> None:
    done = prorl("launch", *OVERRIDES, env=acts(trainer_0=FINISH["trainer-0"]), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    assert f"report:     {run.report_file}" in done.stdout
    assert (tmp_path / "runs" / "latest").resolve() == run.path
    record = json.loads((run.path / "environment.json").read_text())
    assert record["overrides"] == OVERRIDES
    assert "msgspec" in record["packages"]
    assert (run.keys / "server.secret").stat().st_mode & 0o777 == 0o600
    assert processes_of(run) == []

    assert "finished" in prorl("status", "latest", env=acts(), cwd=tmp_path).stdout
    assert "nothing to go on with" in prorl("resume", env=acts(), cwd=tmp_path).stdout
    assert "trainer-0 rank 0 of 1" in prorl("logs", "-c", "trainer-0", env=acts(), cwd=tmp_path).stdout


def test_a_failure_names_the_process_and_resume_goes_on(tmp_path: Path) -> None:
    act = {"exit_after": 0.3, "code": 7, "says": "no such sandbox"}
    done = prorl("launch", *OVERRIDES, "run.restarts=0", env=acts(worker_0=act), cwd=tmp_path)
    assert done.returncode == 1
    assert "worker-0 on" in done.stderr
    assert "exited with code 7" in done.stderr
    assert "| no such sandbox" in done.stderr
    run = only_run(tmp_path)
    assert f"prorl-hpc resume {run.path}" in done.stdout
    assert "worker-0" in prorl("status", "latest", env=acts(), cwd=tmp_path).stdout

    resumed = prorl("resume", env=acts(trainer_0=FINISH["trainer-0"]), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr


def test_a_coordinator_that_is_started_again_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    env = acts(
        coordinator={"exit_after": 0.6, "killed": True, "deaths": 1},
        trainer_0={"exit_after": 1.5, "finish": True, "finish_after_starts": {"coordinator": 2}},
    )
    done = prorl("launch", *OVERRIDES, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = "coordinator was killed by SIGKILL: started again (1 of 3)"
    assert told in done.stdout
    assert told in prorl("status", "latest", env=env, cwd=tmp_path).stdout
    status = json.loads(prorl("status", "latest", "--json", env=env, cwd=tmp_path).stdout)
    assert (status["status"], status["restarts"], status["paused"]) == ("finished", [told], False)


def test_ctrl_c_in_a_terminal_leaves_nothing_within_ten_seconds(tmp_path: Path) -> None:
    env = acts(worker_0={"deaf": True, "grandchild": True})
    terminal = PtyProcess.spawn([*PROGRAM, "launch", *OVERRIDES], env=env, cwd=str(tmp_path))
    wait_for(lambda: all_ready(tmp_path))
    run, begun = only_run(tmp_path), time.monotonic()
    terminal.sendintr()
    said = read_to_end(terminal)
    assert time.monotonic() - begun < 12  # 10 for the run, and the end of this Python
    assert terminal.wait() == 130, said
    assert "resume" in said
    assert "Traceback" not in said
    assert processes_of(run) == []
    assert not run.runtime_dir("/tmp").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_killed_or_hung_up_launch_stops_its_run(tmp_path: Path, number: signal.Signals) -> None:
    launch = subprocess.Popen([*PROGRAM, "launch", *OVERRIDES], env=acts(), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(lambda: all_ready(tmp_path))
    launch.send_signal(number)
    assert launch.wait(20) == 130
    assert processes_of(only_run(tmp_path)) == []


def test_a_launch_whose_output_nobody_reads_any_more_stops_its_run(tmp_path: Path) -> None:
    with subprocess.Popen([*PROGRAM, "launch", *OVERRIDES], env=acts(), cwd=tmp_path, stdout=subprocess.PIPE) as launch:
        wait_for(lambda: all_ready(tmp_path))
        assert launch.stdout is not None
        launch.stdout.close()
        launch.send_signal(signal.SIGTERM)
        launch.wait(20)
    run = only_run(tmp_path)
    wait_for(lambda: processes_of(run) == [])
    assert run.stop_marker.exists()


@pytest.mark.parametrize("verb", ["stop", "cancel"])
def test_a_detached_run_is_stopped_from_elsewhere(tmp_path: Path, verb: str) -> None:
    done = prorl("launch", *OVERRIDES, "--detach", env=acts(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: all_ready(tmp_path))
    run = only_run(tmp_path)
    assert json.loads(prorl("status", "latest", "--json", env=acts(), cwd=tmp_path).stdout)["status"] == "running"
    refused = prorl("resume", env=acts(), cwd=tmp_path)
    assert refused.returncode == 1
    assert "still runs" in refused.stderr
    job = Job.open(run)
    assert job is not None
    stopped = prorl(verb, *([job.record.job_id] if verb == "cancel" else []), env=acts(), cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert processes_of(run) == []
    assert json.loads(prorl("status", "latest", "--json", env=acts(), cwd=tmp_path).stdout)["status"] == "stopped"


@pytest.mark.slurm
def test_launch_on_slurm_shows_the_run_and_ctrl_c_ends_the_job(
    tmp_path: Path, slurm_mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    slurm = ["cluster=slurm", "cluster.inference.partition=gpu", "cluster.trainer.partition=gpu"]
    done = prorl("launch", *OVERRIDES, *slurm, env=acts(trainer_0=FINISH["trainer-0"]), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm job" in done.stdout

    elsewhere = tmp_path / "second"
    elsewhere.mkdir()
    terminal = PtyProcess.spawn([*PROGRAM, "launch", *OVERRIDES, *slurm], env=acts(), cwd=str(elsewhere))
    wait_for(lambda: all_ready(elsewhere))
    terminal.sendintr()
    said = read_to_end(terminal)
    assert terminal.wait() == 130, said
    run = only_run(elsewhere)
    job = Job.open(run)
    assert job is not None
    assert not job.alive()
    assert processes_of(run) == []


@pytest.mark.slurm
def test_a_job_that_slurm_refuses_leaves_no_run_directory(
    tmp_path: Path, slurm_mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    done = prorl("launch", *OVERRIDES, "cluster=slurm", "cluster.trainer.partition=moon", env=acts(), cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no partition moon" in done.stderr
    assert list(tmp_path.glob("runs/*/*")) == []
