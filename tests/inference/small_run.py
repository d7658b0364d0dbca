"""A whole run of real processes on this machine under its own supervisor; no model, no trainer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.keys import RunKeys


def small_config(directory: Path, runtime_root: Path) -> ProrlConfig:
    config = ProrlConfig()
    config.run.root, config.run.runtime_root = str(directory / "runs"), str(runtime_root)
    config.run.restarts = 2
    config.model.path = str(write_chat_model(directory / "model"))
    config.engine.kind, config.sandbox.kind = "scripted", "local"
    config.task.train.size = 64
    config.rollout.heartbeat_s, config.rollout.lost_after_s = 0.3, 12.0
    config.trainer.enabled = False
    return config


class SmallRun:
    def __init__(self, config: ProrlConfig, run: RunDirectory, job: Job) -> None:
        self.config, self.run, self.job = config, run, job

    def state(self, name: str) -> ProcessState | None:
        return read_json(self.run.process_state(name), ProcessState)

    async def ready(self, *names: str) -> None:
        for name in names:
            while (state := self.state(name)) is None or state.phase is not Phase.READY:
                assert self.job.alive(), read_failure(self.run)
                await asyncio.sleep(0.05)

    def client(self) -> RolloutClient:
        runtime = self.run.runtime_dir(self.config.run.runtime_root)
        return RolloutClient.for_run(Process("trainer-0", "trainer", self.run, self.config, runtime))

    def order(self, batch_id: str, groups: int) -> BatchSpec:
        rows = load_rows(self.config.task, "train")
        sampling = SamplingParams(max_tokens=8)
        return BatchSpec(batch_id, self.config.task.name, rows, groups, 4, filter=GroupFilter.ALL, sampling=sampling)


@asynccontextmanager
async def small_run(config: ProrlConfig) -> AsyncIterator[SmallRun]:
    run = RunDirectory.create(config)
    RunKeys.create(run.keys)
    job = submit(run, config, make_plan(config))
    try:
        yield SmallRun(config, run, job)
    finally:
        job.cancel()
        assert await asyncio.to_thread(job.wait, 30)
