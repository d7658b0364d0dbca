"""A run directory, the coordinator's door, and worker processes as the supervisor starts them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from worker_bench import PATIENCE_S, FakeCoordinator

from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import StageFinished, StartInit, WorkerHello
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.sandbox.leftovers import marked_processes
from prorl_hpc.transport.keys import RunKeys


class Site:
    """Use inside a running event loop, and ``close`` it."""

    def __init__(self, config: ProrlConfig, log: Path, sockets: Path) -> None:
        self.config = config
        self.run = RunDirectory.create(config)
        self.keys = RunKeys.create(self.run.keys)
        self.log = log
        self._sockets = sockets
        self._processes: list[subprocess.Popen[bytes]] = []
        self.open_coordinator("c.sock")

    def open_coordinator(self, name: str) -> None:
        """A coordinator behind a door of its own, published as the run's."""
        self.coordinator = FakeCoordinator(self.keys, self._sockets / name, self.config.rollout.heartbeat_s)
        endpoints = {"zmq_ipc": self.coordinator.endpoint, "zmq_tcp": ""}
        state = ProcessState(
            "coordinator", "coordinator", node_name(), os.getpid(), Phase.READY, "", endpoints, time.time()
        )
        write_json(self.run.process_state("coordinator"), state)

    def start(self, name: str = "worker-0") -> subprocess.Popen[bytes]:
        arguments = ["--run-dir", str(self.run.path), "--name", name]
        tasks = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "prorl_hpc.worker", *arguments], stdout=output, stderr=output, env=tasks
            )
        self._processes.append(process)
        return process

    async def joined(self, name: str = "worker-0") -> subprocess.Popen[bytes]:
        """A worker that has said hello."""
        process = self.start(name)
        assert (await self.coordinator.expect(WorkerHello)).worker_id == name
        return process

    async def exit_code(self, process: subprocess.Popen[bytes]) -> int:
        return await asyncio.to_thread(process.wait, PATIENCE_S)

    def state(self, name: str = "worker-0") -> ProcessState:
        state = read_json(self.run.process_state(name), ProcessState)
        assert state is not None
        return state

    async def start_init(self, rollout_id: str, row: dict[str, Any], to: str = "worker-0") -> None:
        spec = RolloutSpec(rollout_id, self.config.task.name, {"id": rollout_id, **row})
        await self.coordinator.order(StartInit(spec, PATIENCE_S), to=to)

    async def init(self, rollout_id: str, row: dict[str, Any], to: str = "worker-0") -> StageFinished:
        await self.start_init(rollout_id, row, to)
        return await self.coordinator.expect(StageFinished)

    @property
    def runtime_dir(self) -> Path:
        return self.run.runtime_dir(self.config.run.runtime_root)

    def boxes(self) -> list[Path]:
        """Directories of sandboxes that are there."""
        return sorted(self.runtime_dir.glob("sb-*/*/work"))

    def sandbox_processes(self) -> list[int]:
        return sorted(process.pid for process in marked_processes(self.runtime_dir))

    async def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        await self.coordinator.close()
