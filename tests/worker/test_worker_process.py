"""``python -m prorl_hpc.worker`` as the supervisor starts it, with real sandboxes of the local runtime."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from worker_bench import PATIENCE_S, FakeCoordinator

from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import Goodbye, Shutdown, StageFinished, StartInit, WorkerHello
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.keys import RunKeys

ROW = {
    "id": "r",
    "kind": "first",
    "question": "What number is in a.txt?",
    "files": {"a.txt": "fig 4711\n"},
    "answer": "4711",
}


@dataclass
class RunningWorker:
    run: RunDirectory
    coordinator: FakeCoordinator
    process: subprocess.Popen[bytes]
    log: Path

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def state(self) -> ProcessState:
        state = read_json(self.run.process_state("worker-0"), ProcessState)
        assert state is not None
        return state

    async def init(self, rollout_id: str) -> StageFinished:
        await self.coordinator.expect(WorkerHello)
        await self.coordinator.order(StartInit(RolloutSpec(rollout_id, "file_quest", ROW), PATIENCE_S))
        return await self.coordinator.expect(StageFinished)


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own directories are too deep for socket paths."""
    with tempfile.TemporaryDirectory(prefix="pw-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def config(tmp_path: Path, short: Path) -> ProrlConfig:
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    config.run.runtime_root = str(short)
    config.model.path = str(write_chat_model(tmp_path / "model"))
    config.sandbox.kind = "local"
    config.rollout.heartbeat_s = 0.1
    return config


@pytest.fixture
async def worker(config: ProrlConfig, tmp_path: Path, short: Path) -> AsyncIterator[RunningWorker]:
    run = RunDirectory.create(config)
    keys = RunKeys.create(run.keys)
    coordinator = FakeCoordinator(keys, short / "c.sock", config.rollout.heartbeat_s)
    endpoints = {"zmq_ipc": coordinator.endpoint, "zmq_tcp": ""}
    state = ProcessState(
        "coordinator", "coordinator", node_name(), os.getpid(), Phase.READY, "", endpoints, time.time()
    )
    write_json(run.process_state("coordinator"), state)
    log = tmp_path / "worker.log"
    arguments = ["--run-dir", str(run.path), "--name", "worker-0"]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "prorl_hpc.worker", *arguments], stdout=output, stderr=output)
    yield RunningWorker(run, coordinator, process, log)
    if process.poll() is None:
        process.kill()
        process.wait()
    await coordinator.close()


async def test_sigterm_frees_everything_and_exits_0(worker: RunningWorker, config: ProrlConfig) -> None:
    assert (await worker.init("r1")).failure is None
    assert worker.state().phase is Phase.READY
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.coordinator.expect(Goodbye) == Goodbye("worker-0")
    assert await worker.exit_code() == 0, worker.log.read_text()
    assert worker.state().phase is Phase.ENDED
    left = [path for path in worker.run.runtime_dir(config.run.runtime_root).rglob("*") if "a.txt" in path.name]
    assert left == []


async def test_shutdown_exits_0(worker: RunningWorker) -> None:
    assert (await worker.init("r1")).failure is None
    await worker.coordinator.order(Shutdown("training is complete"))
    assert await worker.exit_code() == 0, worker.log.read_text()


class TestLost:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.lost_after_s = 1.0
        return config

    async def test_a_lost_coordinator_is_a_failure_with_its_reason(self, worker: RunningWorker) -> None:
        assert (await worker.init("r1")).failure is None
        worker.coordinator.mute = True
        assert await worker.exit_code() == 1
        assert worker.state().phase is Phase.FAILED
        assert "has not been heard for" in worker.state().detail
        assert "Traceback" not in worker.log.read_text()


class TestUnusableModel:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        (Path(config.model.path) / "tokenizer_config.json").write_text("{}")
        return config

    async def test_a_model_without_chat_template_is_told(self, worker: RunningWorker) -> None:
        assert await worker.exit_code() == 1
        assert "has no chat template" in worker.state().detail
        assert "Traceback" not in worker.log.read_text()
