"""Coordinator, workers and inference agent as the real processes of a run; only the model is a script."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.keys import RunKeys

PROCESSES = {"coordinator": "rollout", "worker-0": "worker", "worker-1": "worker", "inference-0": "inference"}


class RealRun:
    def __init__(self, directory: Path, change: Callable[[ProrlConfig], None] = lambda config: None) -> None:
        config = self.config = ProrlConfig()
        config.run.root, config.run.runtime_root = str(directory / "runs"), "/tmp"
        config.model.path = str(write_chat_model(directory / "model"))
        config.engine.kind, config.sandbox.kind = "scripted", "local"
        config.task.train.size = 64
        config.rollout.heartbeat_s, config.rollout.lost_after_s = 0.3, 12.0
        config.trainer.enabled = False
        change(config)
        self.run = RunDirectory.create(config)
        RunKeys.create(self.run.keys)
        write_json(self.run.plan_file, make_plan(config))
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        for name in PROCESSES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process of the newest attempt, for the first time or again."""
        module = f"prorl_hpc.{PROCESSES[name]}"
        command = [sys.executable, "-m", module, "--run-dir", str(self.run.path), "--name", name]
        environment = {**os.environ, "PRORL_RUN_ID": self.run.run_id, "PRORL_ATTEMPT": str(self.run.attempt)}
        with self.run.process_log(name).open("ab") as log:
            self.children[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    async def next_attempt(self) -> None:
        """All processes once more, as in a job that was put back into the queue."""
        for name in PROCESSES:
            await self.kill(name)
        self.run.begin_attempt(self.run.attempt + 1)
        for name in PROCESSES:
            self.start(name)
        await self.ready()

    async def kill(self, name: str) -> None:
        self.children[name].kill()
        await asyncio.to_thread(self.children[name].wait, 10)

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

    def order(self, batch_id: str, groups: int = 12) -> BatchSpec:
        rows = load_rows(self.config.task, "train")
        sampling = SamplingParams(max_tokens=8)
        return BatchSpec(batch_id, self.config.task.name, rows, groups, 4, filter=GroupFilter.ALL, sampling=sampling)

    def end(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
        shutil.rmtree(self.run.runtime_dir("/tmp"), ignore_errors=True)
