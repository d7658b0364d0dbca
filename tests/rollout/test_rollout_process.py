"""The coordinator as a process of a run."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.keys import RunKeys


@pytest.fixture
def config(tmp_path: Path) -> ProrlConfig:
    return ProrlConfig(run=RunSettings(root=str(tmp_path / "runs"), runtime_root="/tmp"))


def made_run(config: ProrlConfig) -> RunDirectory:
    run = RunDirectory.create(config)
    RunKeys.create(run.keys)
    write_json(run.plan_file, make_plan(config))
    return run


class CoordinatorProcess:
    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.restart()

    def restart(self) -> None:
        command = [sys.executable, "-m", "prorl_hpc.rollout", "--run-dir", str(self.run.path), "--name", "coordinator"]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def state(self) -> ProcessState | None:
        return read_json(self.run.process_state("coordinator"), ProcessState)

    def ready(self) -> ProcessState:
        for _ in range(600):
            state = self.state()
            if state is not None and state.phase is Phase.READY:
                return state
            assert self.child.poll() is None, self.child.stderr.read() if self.child.stderr else ""
            time.sleep(0.05)
        raise AssertionError("the coordinator did not become ready")


@pytest.fixture
def coordinator(config: ProrlConfig) -> Iterator[CoordinatorProcess]:
    made = CoordinatorProcess(made_run(config))
    yield made
    made.child.kill()
    made.child.wait()
    runtime = made.run.runtime_dir("/tmp")
    for path in runtime.iterdir():
        path.unlink()
    runtime.rmdir()


async def test_it_serves_and_ends_in_order(coordinator: CoordinatorProcess, config: ProrlConfig) -> None:
    state = coordinator.ready()
    assert set(state.endpoints) == {"zmq_ipc", "uds", "http"}  # one node: ZeroMQ needs no TCP
    for path in (state.endpoints["uds"], state.endpoints["zmq_ipc"].removeprefix("ipc://")):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    run = coordinator.run
    process = Process("trainer-0", "trainer", run, config, run.runtime_dir("/tmp"))
    async with RolloutClient.for_run(process) as near:
        assert (await near.status()).run_id == run.run_id
    process.node = "elsewhere"
    async with RolloutClient.for_run(process) as far:
        assert (await far.status()).workers == []
    assert run.status_file.exists()

    began = time.monotonic()
    coordinator.child.send_signal(signal.SIGTERM)
    assert coordinator.child.wait(10) == 0
    assert time.monotonic() - began < 10
    ended = coordinator.state()
    assert ended is not None and ended.phase is Phase.ENDED
    assert list(run.runtime_dir("/tmp").iterdir()) == []
    with pytest.raises(ServiceError, match="is ended"):
        RolloutClient.for_run(process)


def test_a_coordinator_that_is_started_again_has_the_same_http_address(coordinator: CoordinatorProcess) -> None:
    before = coordinator.ready().endpoints["http"]
    coordinator.child.kill()
    coordinator.child.wait()
    pid = coordinator.child.pid
    coordinator.restart()
    while (state := coordinator.ready()).pid == pid:
        time.sleep(0.05)
    assert state.endpoints["http"] == before


def test_a_second_coordinator_leaves_the_first_one_to_be_found(coordinator: CoordinatorProcess) -> None:
    first = coordinator.ready()
    second = CoordinatorProcess(coordinator.run)
    _, words = second.child.communicate(timeout=30)
    assert second.child.returncode == 1
    assert f"in use by process {first.pid}" in words
    assert coordinator.state() == first


def test_an_http_port_that_is_taken(config: ProrlConfig) -> None:
    with socket.create_server((node_address(), 0)) as taken:
        config.rollout.http_port = taken.getsockname()[1]
        coordinator = CoordinatorProcess(made_run(config))
        _, words = coordinator.child.communicate(timeout=30)
        assert coordinator.child.returncode == 1
        assert "Set rollout.http_port to another port" in words
    coordinator.run.runtime_dir("/tmp").rmdir()


def test_several_nodes_get_a_tcp_door(config: ProrlConfig) -> None:
    config.cluster.kind = "slurm"
    coordinator = CoordinatorProcess(made_run(config))
    try:
        assert coordinator.ready().endpoints["zmq_tcp"].startswith("tcp://")
    finally:
        coordinator.child.terminate()
        assert coordinator.child.wait(10) == 0
    coordinator.run.runtime_dir("/tmp").rmdir()


def test_a_run_directory_without_a_plan(config: ProrlConfig) -> None:
    run = made_run(config)
    run.plan_file.unlink()
    coordinator = CoordinatorProcess(run)
    _, words = coordinator.child.communicate(timeout=30)
    assert coordinator.child.returncode == 1
    assert "plan.json is missing" in words
    state = coordinator.state()
    assert state is not None and state.phase is Phase.FAILED
    run.runtime_dir("/tmp").rmdir()
