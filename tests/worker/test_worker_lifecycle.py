"""A worker's life with its coordinator: Hello, heartbeats, endings, loss, and a coordinator that comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from worker_bench import PATIENCE_S, Bench, FakeCoordinator

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.control import Goodbye, Pools, Shutdown, WorkerHello, WorkerLoad
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.rollout import Stage
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Handlers


async def test_hello_names_pools_and_sandbox_and_heartbeats_follow(bench: Bench) -> None:
    hello = await bench.coordinator.expect(WorkerHello)
    assert hello == WorkerHello("worker-0", "node-a", Pools(init=4, ready=16, run=32, eval=4), "fake")
    assert await bench.coordinator.expect(WorkerLoad) == WorkerLoad("worker-0", 0)
    await bench.init("r1")
    while (await bench.coordinator.expect(WorkerLoad)).sandboxes != 1:
        pass


async def test_shutdown_frees_everything(bench: Bench) -> None:
    await bench.coordinator.expect(WorkerHello)
    await bench.init("r1")
    await bench.start_init("r2", init="hang")
    await bench.coordinator.order(Shutdown("training is complete"))
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.running == "the coordinator ends the run: training is complete"
    assert bench.sandboxes == []


async def test_a_stop_says_goodbye_and_frees_everything(bench: Bench) -> None:
    await bench.coordinator.expect(WorkerHello)
    await bench.init("r1")
    bench.stop.set()
    assert await bench.coordinator.expect(Goodbye) == Goodbye("worker-0")
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.running == "told to stop"
    assert bench.sandboxes == []


class TestSilence:
    """With a short ``lost_after_s``."""

    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.lost_after_s = 1.0
        return config

    async def test_a_lost_coordinator_ends_the_worker_with_the_reason(self, bench: Bench) -> None:
        await bench.coordinator.expect(WorkerHello)
        await bench.init("r1")
        bench.coordinator.mute = True
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RunError, match=r"has not been heard for .*lost_after_s=1"):
                await bench.running
        assert bench.sandboxes == []


class TestReturn:
    """A coordinator that goes away and comes back, elsewhere."""

    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.lost_after_s = 4.0
        return config

    async def test_hello_goes_to_the_new_endpoint(self, bench: Bench, keys: RunKeys, tmp_path: Path) -> None:
        await bench.coordinator.expect(WorkerHello)
        await bench.init("r1")
        await bench.coordinator.close()
        successor = FakeCoordinator(keys, tmp_path / "other.sock", 0.05)
        bench.coordinator.endpoint = successor.endpoint
        [held] = (await successor.expect(WorkerHello)).held
        assert (held.rollout_id, [r.stage for r in held.reports], held.running) == ("r1", [Stage.INIT], None)
        bench.coordinator = successor
        assert (await bench.run("r1")).failure is None


async def test_a_sandbox_that_does_not_stop_is_left_to_the_runtime(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.coordinator.expect(WorkerHello)
    await bench.init("r1")
    [sandbox] = bench.runtime.started
    monkeypatch.setattr("prorl_hpc.worker.agent.STOP_WITHIN_S", 0.1)
    monkeypatch.setattr(sandbox, "stop", asyncio.Event().wait)
    bench.stop.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.running == "told to stop"
    assert "1 sandboxes on node-a did not stop within 0.1 s" in caplog.text
    sandbox.stopped = True


def test_only_the_runs_own_task_may_be_named_by_import_path(config: ProrlConfig) -> None:
    handlers = Handlers(config.task)
    assert handlers("staged_task:StagedTask") is handlers("staged_task:StagedTask")
    assert handlers("file_quest") is handlers("file_quest")
    with pytest.raises(ConfigError, match="is not one that this run serves"):
        handlers("os:system")
