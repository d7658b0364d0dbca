"""Coordinator and workers that die are started again; the processes are fakes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job


def with_restarts(root: Path, restarts: int) -> ProrlConfig:
    config = fake_config(root)
    config.run.restarts = restarts
    return config


def started(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> tuple[RunDirectory, Job]:
    run = fake_run(config, acts)
    return run, submit(run, config, fake_plan(config))


def finish_after(**starts: int) -> dict[str, Any]:
    """The trainer finishes when each of these has been started so often."""
    names = {name.replace("_", "-"): count for name, count in starts.items()}
    return {"exit_after": 0.5, "finish": True, "finish_after_starts": names}


def starts(run: RunDirectory, name: str) -> list[str]:
    file = run.logs / f"{name}.starts"
    return file.read_text().splitlines() if file.exists() else []


def test_coordinator_and_worker_are_started_again_and_the_run_finishes(tmp_path: Path) -> None:
    acts = {
        "coordinator": {"exit_after": 0.6, "killed": True, "deaths": 1, "says": "in the middle of it", "sleeper": True},
        "worker-0": {"exit_after": 0.6, "code": 3, "deaths": 1},
        "trainer-0": finish_after(coordinator=2, worker_0=2),
    }
    run, job = started(with_restarts(tmp_path, 2), acts)
    assert job.wait(40)
    assert read_failure(run) is None
    assert run.finished_marker.exists()
    assert processes_of(run) == []
    told = sorted(str(restart) for restart in read_restarts(run))
    assert told == [
        "coordinator was killed by SIGKILL: started again (1 of 2)",
        "worker-0 exited with code 3: started again (1 of 2)",
    ]
    said = run.process_log("coordinator").read_text()
    before, separator, after = said.partition("coordinator was killed by SIGKILL: started again (1 of 2) -----\n")
    assert "in the middle of it" in before
    assert separator
    assert "coordinator rank 0" in after
    assert "| in the middle of it" in (run.logs / "launcher.log").read_text()
    attempts = {line.split()[0] for name in ("coordinator", "worker-0", "trainer-0") for line in starts(run, name)}
    assert attempts == {"1"}


def test_what_a_dead_process_started_is_gone_before_it_is_started_again(tmp_path: Path) -> None:
    act = {"exit_after": 0.6, "killed": True, "deaths": 1, "sleeper": True}
    run, job = started(with_restarts(tmp_path, 1), {"worker-0": act})
    while len(starts(run, "worker-0")) < 2:
        assert job.alive()
        time.sleep(0.05)
    time.sleep(0.5)  # the second one starts its own
    sleepers = [line for line in processes_of(run) if "sleep 600" in line]
    job.cancel()
    assert job.wait(15)
    assert len(sleepers) == 1
    assert processes_of(run) == []


def test_the_death_after_the_last_restart_ends_the_run(tmp_path: Path) -> None:
    act = {"exit_after": 0.6, "code": 3, "says": "no space left"}
    run, job = started(with_restarts(tmp_path, 1), {"worker-0": act})
    assert job.wait(40)
    failure = read_failure(run)
    assert failure is not None
    assert failure.name == "worker-0"
    assert failure.what == "exited with code 3, after 1 restart (run.restarts=1)"
    assert failure.last_lines[-1] == "no space left"
    assert len(starts(run, "worker-0")) == 2
    assert processes_of(run) == []


def test_a_trainer_is_not_started_again(tmp_path: Path) -> None:
    run, job = started(with_restarts(tmp_path, 3), {"trainer-0": {"exit_after": 0.6, "code": 3}})
    assert job.wait(40)
    failure = read_failure(run)
    assert failure is not None
    assert (failure.name, failure.what) == ("trainer-0", "exited with code 3")
    assert len(starts(run, "trainer-0")) == 1


def test_the_llm_server_of_a_dead_agent_is_gone_before_the_next_agent_starts(tmp_path: Path) -> None:
    """It leads a session of its own and is deaf to SIGTERM, as vLLM may be that waits for its GPU."""
    acts = {
        "inference-0": {"exit_after": 0.6, "killed": True, "deaths": 1, "grandchild": True},
        "trainer-0": finish_after(inference_0=2),
    }
    run, job = started(with_restarts(tmp_path, 1), acts)
    while len(starts(run, "inference-0")) < 2:
        assert job.alive()
        time.sleep(0.01)
    servers = [line for line in processes_of(run) if "SIG_IGN" in line and "bash" not in line]
    assert len(servers) <= 1, servers  # the second agent's own
    assert job.wait(40)
    assert read_failure(run) is None
    assert [str(restart) for restart in read_restarts(run)] == [
        "inference-0 was killed by SIGKILL: started again (1 of 1)"
    ]
    assert processes_of(run) == []


def test_what_was_never_ready_is_not_started_again(tmp_path: Path) -> None:
    act = {"never_ready": True, "exit_after": 0.2, "code": 2, "says": "model.path is empty"}
    run, job = started(with_restarts(tmp_path, 3), {"worker-0": act})
    assert job.wait(40)
    failure = read_failure(run)
    assert failure is not None
    assert (failure.name, failure.exit_code) == ("worker-0", 2)
    assert len(starts(run, "worker-0")) == 1
    assert read_restarts(run) == []


def test_a_stop_while_a_restart_is_pending_ends_at_once(tmp_path: Path) -> None:
    run, job = started(with_restarts(tmp_path, 9), {"worker-0": {"exit_after": 0.3, "killed": True}})
    while len(read_restarts(run)) < 4:  # the next pause is of 4 s
        assert job.alive()
        time.sleep(0.05)
    while "started again (4 of 9)" not in (state := run.process_state("worker-0").read_text()):
        assert job.alive()
    assert '"starting"' in state
    order_stop(run, StopOrder(Ending.STOPPED, "because"))
    assert job.wait(15)
    assert read_failure(run) is None
    assert len(starts(run, "worker-0")) == 4
    assert processes_of(run) == []
