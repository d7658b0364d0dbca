"""The heterogeneous job on real Slurm, with fake processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop
from prorl_hpc.slurm.executors import sbatch_text, submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.refusals import ask_sbatch

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def on_the_cluster(slurm_mini: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "7")  # as within another job: sbatch must not see it
    yield


def started(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> tuple[RunDirectory, Job]:
    run = fake_run(config, acts)
    return run, submit(run, config, fake_plan(config))


def wait_until_ready(run: RunDirectory, job: Job, names: list[str]) -> None:
    while not all(run.process_state(name).exists() for name in names):
        assert job.alive(), read_failure(run)
        time.sleep(0.1)


def test_four_nodes_three_components_one_job(tmp_path: Path) -> None:
    dump = {"dump_environment": True}
    acts = {"inference-0": dump, "worker-1": dump, "trainer-0": {"exit_after": 1.0, "finish": True}}
    run, job = started(fake_config(tmp_path, slurm=True), acts)
    assert job.wait(60)
    assert read_failure(run) is None, read_failure(run)
    assert job.state() == "COMPLETED"
    states = [json.loads(path.read_text()) for path in run.state.glob("*-?.json")]
    assert len({state["node"] for state in states}) == 4
    assert json.loads((run.logs / "inference-0.env.json").read_text())["CUDA_VISIBLE_DEVICES"] == "0"
    on_worker = json.loads((run.logs / "worker-1.env.json").read_text())
    assert {k for k in on_worker if k.startswith("SLURM")} == {"SLURMD_NODENAME", "SLURM_CONF", "SLURM_JOB_ID"}
    assert processes_of(run) == []


def test_a_death_on_one_node_ends_all_and_the_rest_stop_in_order(tmp_path: Path) -> None:
    acts = {"inference-0": {"ready_after": 0.3, "exit_after": 2.0, "code": 9, "says": "CUDA out of memory"}}
    run, job = started(fake_config(tmp_path, slurm=True), acts)
    assert job.wait(60)
    failure = read_failure(run)
    assert failure is not None
    assert (failure.name, failure.node, failure.last_lines[-1]) == ("inference-0", "gpu01", "CUDA out of memory")
    assert job.state() == "FAILED"
    assert {p.stem for p in run.logs.glob("*.stopped")} == {"coordinator", "worker-0", "worker-1", "trainer-0"}
    assert processes_of(run) == []


def test_a_worker_that_dies_is_started_again_on_its_own_node(tmp_path: Path) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.run.restarts = 1
    acts = {
        "worker-1": {"exit_after": 1.0, "killed": True, "deaths": 1},
        "trainer-0": {"exit_after": 0.5, "finish": True, "finish_after_starts": {"worker-1": 2}},
    }
    run, job = started(config, acts)
    assert job.wait(60)
    assert read_failure(run) is None, read_failure(run)
    assert job.state() == "COMPLETED"
    (restart,) = read_restarts(run)
    assert (restart.name, restart.node, restart.what) == ("worker-1", "cpu02", "was killed by SIGKILL")
    assert processes_of(run) == []


def test_scancel_is_a_stop_and_leaves_nothing(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path, slurm=True), {"worker-1": {"grandchild": True}})
    wait_until_ready(run, job, ["coordinator", "worker-1", "trainer-0"])
    job.cancel()
    assert job.wait(30)
    assert job.state() == "CANCELLED"
    assert read_failure(run) is None, read_failure(run)
    assert run.stop_marker.exists()
    assert processes_of(run) == []


def test_a_stop_marker_ends_the_job_with_success(tmp_path: Path) -> None:
    run, job = started(fake_config(tmp_path, slurm=True), {})
    wait_until_ready(run, job, ["coordinator", "trainer-0"])
    order_stop(run, StopOrder(Ending.STOPPED, "told by a test"))
    assert job.wait(30)
    assert job.state() == "COMPLETED"
    assert processes_of(run) == []


def test_a_single_component_is_a_plain_job(tmp_path: Path) -> None:
    config = fake_config(tmp_path, slurm=True)
    plan = fake_plan(config)
    alone = type(plan)(plan.components[:1])
    run = fake_run(config, {})
    assert "hetjob" not in sbatch_text(run, config, alone)
    job = submit(run, config, alone)
    wait_until_ready(run, job, ["coordinator", "worker-1"])
    order_stop(run, StopOrder(Ending.STOPPED, "told by a test"))
    assert job.wait(30)
    assert job.state() == "COMPLETED"


def test_slurm_accepts_the_script_and_its_refusal_is_told(tmp_path: Path) -> None:
    config = fake_config(tmp_path, slurm=True)
    run, plan = fake_run(config, {}), fake_plan(config)
    opinion = ask_sbatch(sbatch_text(run, config, plan))
    assert not opinion.refused
    assert "to start at" in opinion.said
    config.cluster.trainer.partition = "moon"
    with pytest.raises(ConfigError, match=r"Slurm refused the job: .*invalid partition"):
        submit(run, config, plan)
    assert Job.open(run) is None
    queued = subprocess.run(["squeue", "-h", "-n", f"prorl-{run.run_id}"], capture_output=True, text=True)
    assert queued.stdout == ""


def test_a_job_that_slurm_does_not_know_is_told_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prorl_hpc.messages.errors import RunError
    from prorl_hpc.slurm import states

    _, job = started(fake_config(tmp_path, slurm=True), {})
    job.cancel()
    assert job.wait(30)
    monkeypatch.setattr(states, "UNKNOWN_LIMIT_S", -1.0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match="neither squeue nor sacct"):
        job.state(now=True)
