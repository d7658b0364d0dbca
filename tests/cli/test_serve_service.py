"""serve: the service without a trainer, and how to connect to it; the processes are fakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.runs import processes_of

from prorl_hpc.cli import serve
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import Job, JobRecord
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.run_states import RUNNING, RunState

PROGRAM = [sys.executable, str(Path(__file__).with_name("prorl_with_fakes.py"))]
OVERRIDES = ["model=path", "model.path=/no/model", "run.stop_timeout_s=3", "run.drain_s=1"]


def prorl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FAKE_ACTS": "{}", "PRORL_HOME": str(cwd / "home")}
    return subprocess.run([*PROGRAM, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def wait_for(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def ready(name: str, phase: Phase = Phase.READY, **endpoints: str) -> ProcessState:
    return ProcessState(name=name, role=name, node="node7", pid=1, phase=phase, endpoints=endpoints)


def service_run(root: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root, config.trainer.enabled = str(root / "runs"), False
    run = RunDirectory.create(config)
    plan = make_plan(config)
    write_json(run.plan_file, plan)
    assert serve.waited_for(run, plan) == ["coordinator", "worker-0", "inference-0"]
    return run


def test_how_to_connect_is_told_once_all_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = service_run(tmp_path)
    monkeypatch.setattr(serve, "run_state", lambda run: RunState(RUNNING))
    write_json(run.process_state("coordinator"), ready("coordinator", http="http://node7:4711", uds="/tmp/x/c.http"))
    assert serve.main(["--connect", str(run.path)]) == 1
    assert "not ready yet: worker-0, inference-0" in capsys.readouterr().err
    for name in ("worker-0", "inference-0"):
        write_json(run.process_state(name), ready(name))
    assert serve.main(["--connect", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "http://node7:4711" in said and str(run.api_token_file) in said
    assert "on node7:  unix:/tmp/x/c.http" in said
    assert f'RolloutClient.for_run("{run.path}")' in said


def test_a_service_that_has_ended_is_told_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = service_run(tmp_path)
    write_json(run.jobs / "job.json", JobRecord("slurm", "17", "login", 0, 0.0))
    write_json(run.process_state("coordinator"), ready("coordinator", http="http://node7:4711"))
    write_ending(run, AttemptEnding(Ending.STOPPED, "prorl-hpc stop", time.time()))
    assert serve.main(["--connect", str(run.path)]) == 1
    said = capsys.readouterr()
    assert f"{run.run_id} is stopped (prorl-hpc stop)" in said.err and f"resume {run.path}" in said.err
    assert "not ready" not in said.err and said.out == ""


def test_an_attached_service_is_announced_after_its_processes_were_shown_as_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = service_run(tmp_path)
    job = serve._AnnouncingJob(Job(JobRecord("slurm", "17", "login", 0, 0.0)), run, make_plan(run.load_config()))
    job.state = lambda now=False: "RUNNING"  # type: ignore[method-assign]
    for name in ("coordinator", "worker-0", "inference-0"):
        assert job.alive()
        write_json(run.process_state(name), ready(name, http="http://node7:4711"))
    assert job.alive()
    assert capsys.readouterr().out == ""  # the display reads after this question, and shows them now
    assert job.alive() and job.alive()
    assert capsys.readouterr().out.count("is ready.") == 1


def test_a_service_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not ready"):
        serve.connection_text(service_run(tmp_path))


def test_a_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.enabled must be false"):
        serve.main(["trainer.enabled=true"])


def test_a_dry_run_has_no_trainer(tmp_path: Path) -> None:
    done = prorl("serve", *OVERRIDES, "--dry-run", cwd=tmp_path)
    assert "this node: coordinator, worker-0, inference-0\n" in done.stdout, done.stderr


def test_a_detached_service_is_asked_later_and_stopped(tmp_path: Path) -> None:
    done = prorl("serve", *OVERRIDES, "--detach", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (RunDirectory(path.parent) for path in tmp_path.glob("runs/20*/*/config.yaml"))
    assert f"prorl-hpc serve --connect {run.path}" in done.stdout
    assert json.loads((run.path / "environment.json").read_text())["overrides"][-1] == "trainer.enabled=false"
    wait_for(lambda: len([p for p in run.state.glob("*.json") if '"ready"' in p.read_text()]) == 3)
    stopped = prorl("stop", str(run.path), cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert processes_of(run) == []


def test_an_attached_service_ends_with_its_terminal(tmp_path: Path) -> None:
    environment = {**os.environ, "FAKE_ACTS": "{}", "PRORL_HOME": str(tmp_path / "home")}
    log = tmp_path / "said"
    with log.open("w") as out:
        child = subprocess.Popen([*PROGRAM, "serve", *OVERRIDES], cwd=tmp_path, env=environment, stdout=out)
    try:
        wait_for(lambda: "The rollout service of demo-" in log.read_text())
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        (run,) = (RunDirectory(path.parent) for path in tmp_path.glob("runs/20*/*/config.yaml"))
        assert processes_of(run) == []
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(30)
        for config in tmp_path.glob("runs/20*/*/config.yaml"):
            prorl("stop", "--now", str(config.parent), cwd=tmp_path)
