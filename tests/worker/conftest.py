"""A worker with fake sandboxes, a scripted LLM and a fake coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import staged_task
from worker_bench import PATIENCE_S, Bench, FakeCoordinator, FakeLLMs
from worker_site import Site

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import TRAINED, ProrlConfig
from prorl_hpc.sandbox.fake import FakeRuntime
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Worker
from prorl_hpc.worker.policies import Policy


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.create(tmp_path / "keys")


@pytest.fixture
def config() -> ProrlConfig:
    config = ProrlConfig()
    config.task.name = "staged_task:StagedTask"
    config.rollout.heartbeat_s = 0.05
    config.rollout.drain_s = 0.3
    return config


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own directories are too deep for socket paths."""
    with tempfile.TemporaryDirectory(prefix="pw-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def process_config(tmp_path: Path, short: Path) -> ProrlConfig:
    """For worker processes with real sandboxes."""
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    config.run.runtime_root = str(short)
    config.model.path = str(write_chat_model(tmp_path / "model"))
    config.sandbox.kind = "local"
    config.rollout.heartbeat_s = 0.1
    config.rollout.drain_s = 0.3
    return config


@pytest.fixture
async def site(config: ProrlConfig, tmp_path: Path, short: Path) -> AsyncIterator[Site]:
    opened = Site(config, tmp_path / "worker.log", short)
    yield opened
    await opened.close()


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def more_policies() -> dict[str, Policy]:
    return {}


@pytest.fixture
async def bench(
    tmp_path: Path,
    keys: RunKeys,
    config: ProrlConfig,
    chat: ChatFormat,
    runtime: FakeRuntime,
    more_policies: dict[str, Policy],
) -> AsyncIterator[Bench]:
    coordinator = FakeCoordinator(keys, tmp_path / "c.sock", config.rollout.heartbeat_s)
    llms = FakeLLMs(ScriptedLLM(chat, lambda prompt: "hello"))
    policies = {TRAINED: Policy(chat, max_context_tokens=512, max_turn_tokens=64), **more_policies}
    worker = Worker("worker-0", "node-a", config, keys, runtime, llms, policies, lambda: coordinator.endpoint)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    staged_task.mortal = asyncio.Event()
    bench = Bench(coordinator, runtime, llms, worker, stop, running, config.task.name)
    yield bench
    staged_task.mortal.set()
    stop.set()
    with contextlib.suppress(Exception):
        async with asyncio.timeout(PATIENCE_S):
            await running
    await bench.coordinator.close()  # a test may have put another one in its place
    assert bench.sandboxes == []
