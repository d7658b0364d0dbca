"""A node's supervisor, submitted through submitit's local executor, with fake processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop, read_ending
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job

FINISH = {"trainer-0": {"exit_after": 0.5, "finish": True}}


def started(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> tuple[RunDirectory, Job]:
    run = fake_run(config, acts)
    return run, submit(run, config, fake_plan(config))


def test_a_finished_trainer_stops_the_others_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    run, job = started(config, FINISH)
    assert job.wait(30)
    assert read_failure(run) is None
    stopped = {p.stem: float(p.read_text()) for p in run.logs.glob("*.stopped")}
    assert min(stopped, key=stopped.__getitem__) == "coordinator"
    assert set(stopped) == {"inference-0", "worker-0", "coordinator"}
    assert processes_of(run) == []
    assert not run.runtime_dir(config.run.runtime_root).exists()
    assert run.report_file.exists()


def test_the_first_death_is_named_with_its_last_lines(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path), {"worker-0": {"exit_after": 0.2, "code": 3, "says": "no space left"}})
    assert job.wait(30)
    failure = read_failure(run)
    assert failure is not None
    assert (failure.name, failure.exit_code) == ("worker-0", 3)
    assert failure.last_lines[-1] == "no space left"
    assert processes_of(run) == []


def test_exit_code_zero_before_the_end_is_a_death_too(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path), {"inference-0": {"exit_after": 0.2}})
    assert job.wait(30)
    failure = read_failure(run)
    assert failure is not None
    assert "exited with code 0 before the run was finished" in str(failure)


def test_what_did_not_come_up_is_named(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    config.run.start_timeout_s = 4.0
    run, job = started(config, {"inference-0": {"never_ready": True}})
    assert job.wait(30)
    failure = read_failure(run)
    assert failure is not None
    assert failure.name == "inference-0"
    assert "not ready on this node: inference-0" in failure.what


def test_the_deaf_and_the_escaped_are_killed(tmp_path: Path) -> None:
    acts = {"worker-0": {"deaf": True, "grandchild": True}, **FINISH}
    run, job = started(fake_config(tmp_path), acts)
    assert job.wait(30)
    assert read_failure(run) is None
    assert processes_of(run) == []


@pytest.mark.parametrize("how", ["marker", "signal"])
def test_a_stop_is_no_failure(tmp_path: Path, how: str) -> None:
    run, job = started(fake_config(tmp_path), {})
    while not run.process_state("trainer-0").exists():
        assert job.alive()
    if how == "marker":
        order_stop(run, StopOrder(Ending.STOPPED, "because"))
    else:
        job.cancel()
    assert job.wait(15)
    assert read_failure(run) is None
    ending = read_ending(run)
    assert ending is not None
    assert (ending.ending, ending.goes_on) == (Ending.STOPPED, False)
    assert processes_of(run) == []


def test_a_stop_with_time_to_drain_waits_for_the_rollouts_and_the_trainer_saves_at_once(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path), {"coordinator": {"drain_after": 1.5}})
    while not all(run.process_state(name).exists() for name in ("coordinator", "trainer-0", "worker-0")):
        assert job.alive()
    order_stop(run, StopOrder(Ending.STOPPED, "because", drain_s=20.0))
    assert job.wait(15)
    stopped = {p.stem: float(p.read_text()) for p in run.logs.glob("*.stopped")}
    assert run.drained_marker.exists() or not run.state.exists()
    assert stopped["worker-0"] - stopped["trainer-0"] > 1.0
    assert processes_of(run) == []


def test_a_second_attempt_in_the_same_directory_starts_fresh(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    run, job = started(config, {"worker-0": {"exit_after": 0.2, "code": 3}})
    assert job.wait(30)
    (run.path / "fakes.json").write_text(json.dumps(FINISH))
    again = submit(run, config, fake_plan(config))
    assert again.wait(30)
    assert read_failure(run) is None
    assert run.finished_marker.exists()
    first, second = run.all_attempts()
    assert read_failure(first) is not None
    assert run.attempt == second.attempt == 2


def test_setup_lines_reach_the_processes_and_slurm_variables_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    monkeypatch.setenv("PMI_RANK", "0")
    config = fake_config(tmp_path)
    config.cluster.setup = ["export FROM_SETUP='two words'", "echo hello"]
    run, job = started(config, {"worker-0": {"dump_environment": True}, **FINISH})
    assert job.wait(30)
    environ = json.loads((run.logs / "worker-0.env.json").read_text())
    assert environ["FROM_SETUP"] == "two words"
    assert not {"SLURM_MEM_PER_NODE", "PMI_RANK", "SUBMITIT_EXECUTOR"} & set(environ)


def test_a_setup_line_that_fails_ends_the_run(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    config.cluster.setup = ["module_that_is_not_there load cuda"]
    run, job = started(config, {})
    assert job.wait(30)
    failure = read_failure(run)
    assert failure is not None
    assert "a line of cluster.setup failed with code 127" in failure.what


def test_the_processes_die_with_their_supervisor(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path), {"worker-0": {"deaf": True}})
    while not run.process_state("trainer-0").exists():
        assert job.alive()
    child = json.loads(run.process_state("trainer-0").read_text())["pid"]
    os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
    assert job.wait(15)
    assert processes_of(run) == []
    assert read_failure(run) is None  # nobody was left to write it: launch says that the job ended without a word


def test_settings_that_do_not_load_are_a_named_failure(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    run = fake_run(config, {})
    run.config_file.write_text("run: {name: [}")
    job = submit(run, config, fake_plan(config))
    assert job.wait(30)
    failure, ending = read_failure(run), read_ending(run)
    assert failure is not None and ending is not None
    assert "config.yaml" in failure.what
    assert ending.ending is Ending.FAILED
