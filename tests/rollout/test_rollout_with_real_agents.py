"""Coordinator, workers and inference agent as the real processes of a run; only the model is a script."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchSpec, BatchState, GroupFilter
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.rollout import SamplingParams, Status
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.keys import RunKeys

pytestmark = pytest.mark.timeout(240)
PROCESSES = {"coordinator": "rollout", "worker-0": "worker", "worker-1": "worker", "inference-0": "inference"}


class RealRun:
    def __init__(self, directory: Path) -> None:
        config = self.config = ProrlConfig()
        config.run.root, config.run.runtime_root = str(directory / "runs"), "/tmp"
        config.model.path = str(write_chat_model(directory / "model"))
        config.engine.kind, config.sandbox.kind = "scripted", "local"
        config.task.train.size = 16
        config.rollout.heartbeat_s, config.rollout.lost_after_s = 0.3, 3.0
        config.trainer.enabled = False
        self.run = RunDirectory.create(config)
        RunKeys.create(self.run.keys)
        write_json(self.run.plan_file, make_plan(config))
        self.children = {name: self._start(name, module) for name, module in PROCESSES.items()}

    def _start(self, name: str, module: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"prorl_hpc.{module}", "--run-dir", str(self.run.path), "--name", name]
        with self.run.process_log(name).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    async def ready(self) -> None:
        for name in PROCESSES:
            while True:
                state = read_json(self.run.process_state(name), ProcessState)
                if state is not None and state.phase is Phase.READY:
                    break
                assert self.children[name].poll() is None, self.run.process_log(name).read_text()
                await asyncio.sleep(0.1)

    def client(self, patience_s: float) -> RolloutClient:
        process = Process("trainer-0", "trainer", self.run, self.config, self.run.runtime_dir("/tmp"))
        return RolloutClient.for_run(process, patience_s=patience_s)

    def order(self, batch_id: str) -> BatchSpec:
        rows = load_rows(self.config.task, "train")
        sampling = SamplingParams(max_tokens=8)
        return BatchSpec(batch_id, self.config.task.name, rows, 12, 4, filter=GroupFilter.ALL, sampling=sampling)


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[RealRun]:
    made = RealRun(tmp_path)
    await made.ready()
    yield made
    for child in made.children.values():
        child.kill()
        child.wait()
    shutil.rmtree(made.run.runtime_dir("/tmp"), ignore_errors=True)


async def test_batches_flow_and_a_killed_worker_loses_none(real: RealRun) -> None:
    async with real.client(patience_s=1) as client:
        await client.submit_batch(real.order("first"))
        first = await client.wait_batch("first")
        rollouts = [r for group in first.groups for r in group.rollouts]
        assert {r.status for r in rollouts} == {Status.DONE}
        assert {r.worker for r in rollouts} == {"worker-0", "worker-1"}
        assert all(r.trajectory.num_trained_tokens > 0 for r in rollouts)

        await client.submit_batch(real.order("second"))
        while (await client.batch_progress("second")).rollouts_done == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        real.children["worker-1"].kill()
        second = await client.wait_batch("second")
        assert second.progress.state is BatchState.DONE
        assert {r.status for group in second.groups for r in group.rollouts} == {Status.DONE}

        await client.submit_batch(real.order("third"))
        waiting = asyncio.create_task(client.wait_batch("third"))
        await asyncio.sleep(0)
        real.children["coordinator"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(real.children["coordinator"].wait, 20) == 0
        with pytest.raises(ServiceError):
            await waiting
        for name in ("worker-0", "inference-0"):
            assert await asyncio.to_thread(real.children[name].wait, 20) == 0, real.run.process_log(name).read_text()
    table = read_rollouts(real.run, ["batch_id", "status"])
    assert table.num_rows == 96
