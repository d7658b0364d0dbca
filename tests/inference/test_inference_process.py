"""``python -m prorl_hpc.inference`` as the supervisor starts it, with a coordinator of the test's own."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.config.schema import EngineConfig, ModelConfig, ProrlConfig, RolloutConfig, RunSettings
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import AgentToCoordinator, InferenceHello, ServerLoad, Shutdown, Welcome
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.plan import ComponentPlan, NodePlan, Plan
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

PATIENCE_S = 60


class Run:
    """A run directory, a coordinator's door, and the inference process."""

    def __init__(self, directory: Path, engine: EngineConfig, model: ModelConfig) -> None:
        config = ProrlConfig(
            run=RunSettings(root=str(directory / "runs"), runtime_root=str(directory)),
            engine=engine,
            model=model,
            rollout=RolloutConfig(heartbeat_s=0.2),
        )
        self.runtime_root = directory
        self.directory = RunDirectory.create(config)
        self.keys = RunKeys.create(self.directory.keys)
        self.hellos: asyncio.Queue[tuple[bytes, InferenceHello]] = asyncio.Queue()
        self._open_door(directory / "c.sock")
        self.process: asyncio.subprocess.Process | None = None

    def _open_door(self, path: Path) -> None:
        self.door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, self.keys, path)
        self._listening = asyncio.create_task(self._listen())

    def replace_coordinator(self) -> None:
        """It dies; another one comes at another address, where it knows nobody."""
        self._listening.cancel()
        self.door.close()
        self.hellos = asyncio.Queue()
        self._open_door(self.runtime_root / "c2.sock")
        self.coordinator_ready()

    async def _listen(self) -> None:
        async for peer, message in self.door.messages():
            if isinstance(message, InferenceHello | ServerLoad):
                await self.door.send(peer, Welcome(self.directory.run_id, heartbeat_s=0.2))
                self.hellos.put_nowait((peer, message))

    def coordinator_ready(self) -> None:
        endpoints = {"zmq_ipc": self.door.ipc, "zmq_tcp": ""}
        state = ProcessState("coordinator", "coordinator", node_name(), 1, Phase.READY, "", endpoints, time.time())
        write_json(self.directory.process_state("coordinator"), state)

    async def start(self) -> None:
        command = [sys.executable, "-m", "prorl_hpc.inference", "--run-dir", str(self.directory.path)]
        command += ["--name", "inference-0", "--index", "0"]
        with self.directory.process_log("inference-0").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

    async def hello(self) -> tuple[bytes, InferenceHello]:
        return await asyncio.wait_for(self.hellos.get(), PATIENCE_S)

    async def exit_status(self) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    @property
    def state(self) -> ProcessState | None:
        return read_json(self.directory.process_state("inference-0"), ProcessState)

    async def until_phase(self, phase: Phase, detail: str = "") -> ProcessState:
        def reached() -> bool:
            state = self.state
            return state is not None and state.phase is phase and detail in state.detail

        await until(reached)
        assert self.state is not None
        return self.state

    @property
    def log(self) -> str:
        return self.directory.process_log("inference-0").read_text()

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self._listening.cancel()
        self.door.close()


@pytest.fixture
async def runs(socket_dir: Path) -> AsyncIterator[Any]:
    opened: list[Run] = []

    def open_run(engine: EngineConfig, model: ModelConfig | None = None) -> Run:
        opened.append(Run(socket_dir, engine, model or ModelConfig()))
        return opened[-1]

    yield open_run
    for run in opened:
        await run.close()


async def generate(run: Run, hello: InferenceHello) -> list[int]:
    client = LLMClient(node_name(), run.keys, "worker-0")
    completion = await client.for_rollout(hello.server, "r").generate([1, 2], SamplingParams(max_tokens=4, seed=1))
    await client.close()
    return completion.token_ids


async def test_it_serves_and_ends_in_order_on_sigterm(runs: Any) -> None:
    run = runs(EngineConfig(kind="scripted"))
    await run.start()
    await run.until_phase(Phase.STARTING, "waiting for the coordinator")
    run.coordinator_ready()
    _, hello = await run.hello()
    assert hello.server.tcp == ""
    assert 0 < len(await generate(run, hello)) <= 4
    state = await run.until_phase(Phase.READY)
    assert state.endpoints == {"zmq_ipc": hello.server.ipc}
    run.process.send_signal(signal.SIGTERM)
    assert await run.exit_status() == 0, run.log
    assert run.state.phase is Phase.ENDED
    assert not Path(hello.server.ipc.removeprefix("ipc://")).exists()


async def test_it_follows_a_coordinator_that_was_started_elsewhere(runs: Any) -> None:
    run = runs(EngineConfig(kind="scripted"))
    run.coordinator_ready()
    await run.start()
    _, first = await run.hello()
    await run.hello()
    run.replace_coordinator()
    peer, second = await run.hello()
    assert isinstance(second, InferenceHello) and second == first
    await run.door.send(peer, Shutdown("done"))
    assert await run.exit_status() == 0, run.log


async def test_shutdown_ends_it_too(runs: Any) -> None:
    run = runs(EngineConfig(kind="scripted"))
    run.coordinator_ready()
    await run.start()
    peer, _ = await run.hello()
    await run.door.send(peer, Shutdown("training is complete"))
    assert await run.exit_status() == 0
    assert "training is complete" in run.log


async def test_sigterm_while_it_starts_ends_it(runs: Any) -> None:
    run = runs(EngineConfig(kind="scripted"))
    await run.start()
    await run.until_phase(Phase.STARTING, "waiting for the coordinator")
    run.process.send_signal(signal.SIGTERM)
    assert await run.exit_status() == 0
    assert run.state.phase is Phase.ENDED


async def test_a_plan_of_several_nodes_opens_tcp(runs: Any) -> None:
    run = runs(EngineConfig(kind="scripted"))
    write_json(run.directory.plan_file, Plan([ComponentPlan("all", [NodePlan([]), NodePlan([])])]))
    run.coordinator_ready()
    await run.start()
    _, hello = await run.hello()
    assert hello.server.tcp.startswith("tcp://")
    client = LLMClient("another-node", run.keys, "worker-1")
    completion = await client.for_rollout(hello.server, "r").generate([1], SamplingParams(max_tokens=2))
    assert completion.token_ids
    await client.close()


async def test_a_model_that_is_not_there_is_told(runs: Any) -> None:
    run = runs(EngineConfig(kind="transformers"), ModelConfig(path="/nonexistent"))
    await run.start()
    assert await run.exit_status() == 1
    assert run.state.phase is Phase.FAILED
    assert "model.path=/nonexistent is not a Hugging Face model directory" in run.state.detail
    assert "Traceback" not in run.log


@pytest.mark.train
@pytest.mark.slow
async def test_the_transformers_engine_behind_it_all(runs: Any, tiny_model: Path) -> None:
    run = runs(EngineConfig(kind="transformers"), ModelConfig(path=str(tiny_model), max_context_tokens=128))
    run.coordinator_ready()
    await run.start()
    _, hello = await run.hello()
    assert hello.engine.startswith("transformers") and hello.max_model_len == 128
    assert 0 < len(await generate(run, hello)) <= 4
    run.process.send_signal(signal.SIGTERM)
    assert await run.exit_status() == 0, run.log


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_vllm_server_ends_with_its_agent(runs: Any, tiny_model: Path, number: signal.Signals) -> None:
    """While it is being loaded, which is when it least expects it; in order, and when the agent has no last word."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'prorl_hpc[vllm]'")
    run = runs(EngineConfig(kind="vllm"), ModelConfig(path=str(tiny_model), max_context_tokens=128))
    run.coordinator_ready()
    await run.start()
    await run.until_phase(Phase.STARTING, "vLLM: importing (1 s)")
    assert servers_of(run)
    run.process.send_signal(number)
    assert await run.exit_status() == (0 if number is signal.SIGTERM else -number)
    await until(lambda: not servers_of(run))


def servers_of(run: Run) -> list[psutil.Process]:
    """vLLM processes that serve on this run's socket."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(run.runtime_root) in command and "vllm_launcher" in command and process.info["status"] != "zombie":
            found.append(process)
    return found
