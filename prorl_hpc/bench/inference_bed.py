"""LLM servers as a run has them, for one measurement: coordinator, inference agents, engines, and a worker's client.

with InferenceBed.open(model, EngineConfig(…), 2048, say) as bed:
    asyncio.run(measure(bed))
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.bench.vllm_door import VllmDoor
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import EngineConfig, ModelConfig, ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.inference.factory import resolve_engine
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.transport.keys import RunKeys

_SAY_EVERY_S = 10.0
_POLL_S = 0.05
_STOP_S = 60.0


def small_model(name: str) -> Path:
    """The directory of a model that ``prorl-hpc model prepare`` makes; RunError if it was not made."""
    path = prepared_model(name)
    if not path.is_dir():
        raise RunError(f"{path} is not there: `prorl-hpc model prepare {name}` makes it")
    return path


class InferenceBed:
    """One server for each of ``engine.servers_per_node``; ``agent`` is the module of its process."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        engine: EngineConfig,
        max_context_tokens: int,
        processes: Processes,
        agent: str,
    ) -> None:
        config = ProrlConfig(
            run=RunSettings(name="bench", root=str(directory / "runs"), runtime_root=str(directory)),
            model=ModelConfig(name=model.name, path=str(model), max_context_tokens=max_context_tokens),
            engine=engine,
            trainer=TrainerConfig(enabled=False),
        )
        self.model = model
        self.max_context_tokens = max_context_tokens
        self.engine = engine
        self.run = RunDirectory.create(config)
        RunKeys.create(self.run.keys)
        plan = make_plan(config)
        write_json(self.run.plan_file, plan)
        self.names = [process.name for process in plan.processes if process.role == "inference"]
        self.processes = processes
        self._agent = agent
        self._runtime = self.run.runtime_dir(config.run.runtime_root)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, model: Path, engine: EngineConfig, max_context_tokens: int, say: Say, agent: str = "inference"
    ) -> Iterator[InferenceBed]:
        """Start all; at the end nothing of it is left. What goes wrong comes with the last lines of all logs.
        ConfigError if the engine is not installed."""
        resolve_engine(engine.kind)
        with scratch_directory() as directory:
            logs = directory / "logs"
            logs.mkdir()
            with Processes(logs) as processes:
                bed = cls(directory, model, engine, max_context_tokens, processes, agent)
                try:
                    bed._start(say)
                    yield bed
                except ProrlError as error:
                    raise RunError(f"{error}\nThe last lines of the processes:\n{processes.tails()}") from error
                finally:
                    bed._stop(say)

    def _stop(self, say: Say) -> None:
        """Let each agent end its engine: vLLM's own processes hide the mark by which all else is killed."""
        for name in filter(self.processes.runs, self.names):
            try:
                self.processes.stop(name, _STOP_S)
            except RunError as error:
                say(f"it is killed: {error}")

    def _start(self, say: Say) -> None:
        self._start_module("rollout", "coordinator", 0)
        self._wait_ready("coordinator", say)
        for index, name in enumerate(self.names):
            self._start_module(self._agent, name, index)
        for name in self.names:
            self._wait_ready(name, say)

    def _start_module(self, module: str, name: str, index: int) -> None:
        command = [sys.executable, "-m", f"prorl_hpc.{module}", "--run-dir", str(self.run.path), "--name", name]
        self.processes.start(name, [*command, "--index", str(index)], {"PRORL_LOG_LEVEL": "WARNING"})

    def _wait_ready(self, name: str, say: Say) -> None:
        began = said = time.monotonic()
        while time.monotonic() - began < self.engine.start_timeout_s:
            self.processes.check()
            state = self._state(name)
            if state is not None and state.phase is Phase.READY:
                return
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(f"{name}: {state.detail if state is not None else 'starting'}")
            time.sleep(_POLL_S)
        raise RunError(f"{name} was not ready after {self.engine.start_timeout_s:g} s (engine.start_timeout_s)")

    def _state(self, name: str) -> ProcessState | None:
        return read_json(self.run.process_state(name), ProcessState)

    @property
    def servers(self) -> list[ServerRef]:
        """As the agents tell the coordinator."""
        found = []
        for name in self.names:
            state = self._state(name)
            assert state is not None, "it is ready"
            found.append(ServerRef(name, state.node, state.endpoints["zmq_ipc"], ""))
        return found

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[LLMClient]:
        """A worker's."""
        client = LLMClient(self.servers[0].node, RunKeys.load(self.run.keys), "bench")
        try:
            yield client
        finally:
            await client.close()

    @contextlib.asynccontextmanager
    async def doors(self) -> AsyncIterator[list[VllmDoor]]:
        """vLLM's own HTTP of each server, past its agent."""
        doors = [VllmDoor(self._runtime / f"{name}-vllm.sock") for name in self.names]
        try:
            yield doors
        finally:
            for door in doors:
                await door.close()
