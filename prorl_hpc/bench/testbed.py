"""A rollout service of real processes for one measurement: coordinator, workers, an idle LLM server.

with Testbed.open(RolloutConfig(…), workers=1) as bed:
    bed.start()
    …
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.bench.load_client import Load
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.timed_task import TASK_NAME
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, ProrlConfig, RolloutConfig, RunSettings, TaskConfig, TrainerConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.keys import RunKeys

_READY_S = 90.0
_CONTEXT = 1 << 17
"""Tokens, more than any row asks for."""


class Testbed:
    """``directory`` holds the run, its sockets and its logs; ``workers`` are named worker-0, worker-1, …"""

    def __init__(self, directory: Path, rollout: RolloutConfig, workers: int, processes: Processes) -> None:
        config = ProrlConfig(
            run=RunSettings(name="bench", root=str(directory / "runs"), runtime_root=str(directory)),
            model=ModelConfig(
                name="none", path=str(write_chat_model(directory / "model")), max_context_tokens=_CONTEXT
            ),
            task=TaskConfig(name=TASK_NAME),
            rollout=rollout,
            trainer=TrainerConfig(enabled=False),
        )
        self.run = RunDirectory.create(config)
        RunKeys.create(self.run.keys)
        write_json(self.run.plan_file, make_plan(config))
        self.processes = processes
        self.workers = [f"worker-{number}" for number in range(workers)]

    @classmethod
    @contextlib.contextmanager
    def open(cls, rollout: RolloutConfig, workers: int) -> Iterator[Testbed]:
        """Make it; at the end nothing of it is left. What goes wrong comes with the last lines of all logs."""
        with scratch_directory() as directory:
            logs = directory / "logs"
            logs.mkdir()
            with Processes(logs) as processes:
                try:
                    yield cls(directory, rollout, workers, processes)
                except ProrlError as error:
                    raise RunError(f"{error}\nThe last lines of the processes:\n{processes.tails()}") from error

    def start(self) -> None:
        """Returns when all are ready."""
        self.start_coordinator()
        self.start_module("bench.idle_server", "server-0")
        for name in self.workers:
            self.start_worker(name)
        for name in ("server-0", *self.workers):
            self.wait_ready(name)

    def start_coordinator(self) -> None:
        """Also again after a kill."""
        self.start_module("rollout", "coordinator")
        self.wait_ready("coordinator")

    def start_worker(self, name: str) -> None:
        self.start_module("bench.noop_worker", name)

    def wait_ready(self, name: str) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            self.processes.check()
            state = read_json(self.run.process_state(name), ProcessState)
            # A process that was killed has left a state that says READY.
            if state is not None and state.phase is Phase.READY and state.pid == self.processes.pid(name):
                return
            time.sleep(0.02)
        raise RunError(f"{name} was not ready after {_READY_S:g} s")

    def start_client(self, name: str, load: Load) -> None:
        asked = self.run.state / f"{name}.asked.json"
        write_json(asked, load)
        self.start_module("bench.load_client", name, "--load", str(asked))

    def wait_client(self, name: str, timeout_s: float) -> None:
        """Until it has all results. RunError if it fails, or another process ends meanwhile."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.processes.runs(name):
                if (code := self.processes.wait(name, 1.0)) != 0:
                    raise RunError(f"the client {name} ended with exit code {code}")
                return
            self.processes.check(but=name)
            time.sleep(0.05)
        raise RunError(f"the client {name} did not have all results after {timeout_s:.0f} s")

    def stop(self) -> None:
        """End all in order, so that they write what they have to say. RunError if one does not end with 0."""
        for name in (*self.workers, "server-0", "coordinator"):
            if self.processes.runs(name) and (code := self.processes.stop(name)) != 0:
                raise RunError(f"{name} ended with exit code {code}")

    def start_module(self, module: str, name: str, *arguments: str) -> None:
        """``python -m prorl_hpc.<module>`` as a process of this run."""
        command = [sys.executable, "-m", f"prorl_hpc.{module}", "--run-dir", str(self.run.path), "--name", name]
        environment = {"PRORL_LOG_LEVEL": "WARNING"}
        self.processes.start(name, [*command, *arguments], environment)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory with a short name, for sockets: removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="prorl-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
