"""The inference agent between a coordinator and workers, over real ZeroMQ, with an engine that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from prorl_hpc.config.schema import EngineConfig, ProrlConfig, RolloutConfig
from prorl_hpc.inference.agent import InferenceAgent
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.inference.scripted_engine import ScriptedEngine, scripted_scores
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    CoordinatorToInference,
    Goodbye,
    InferenceHello,
    ServerLoad,
    ServerRef,
    Shutdown,
    Welcome,
)
from prorl_hpc.messages.errors import InferenceError, RunError
from prorl_hpc.messages.inference import (
    FinishReason,
    Generate,
    InferenceToWorker,
    WeightProbe,
    WeightUpdate,
    WeightUpdated,
    WorkerToInference,
)
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.channels import DealerLine, RouterDoor
from prorl_hpc.transport.keys import RunKeys

ENDLESS = SamplingParams(max_tokens=10**9)
PATIENCE_S = 30


def endless(token_ids: Any, sampling: SamplingParams) -> Any:
    return range(sampling.max_tokens)


class Coordinator:
    """Welcomes the agent and keeps what it says."""

    def __init__(self, keys: RunKeys, path: Path) -> None:
        self.door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, path)
        self.heard: list[Any] = []
        self._peer = b""
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for peer, message in self.door.messages():
            self._peer = peer
            self.heard.append(message)
            if isinstance(message, InferenceHello | ServerLoad):
                await self.door.send(peer, Welcome("run", heartbeat_s=0.05))

    async def send(self, message: Any) -> None:
        await self.door.send(self._peer, message)

    async def next(self, type_: type, accept: Callable[[Any], bool] = lambda m: True) -> Any:
        """The first message of that kind after those already taken."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for i, message in enumerate(self.heard):
                    if isinstance(message, type_) and accept(message):
                        del self.heard[: i + 1]
                        return message
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self._task.cancel()
        self.door.close()


class Site:
    """One agent, its coordinator and the means to make workers."""

    def __init__(self, directory: Path, engine: ScriptedEngine, slots: int) -> None:
        self.keys = RunKeys.create(directory / "keys")
        self.engine = engine
        self.coordinator = Coordinator(self.keys, directory / "c.sock")
        config = ProrlConfig(
            engine=EngineConfig(max_parallel_requests=slots), rollout=RolloutConfig(heartbeat_s=0.05, lost_after_s=2.0)
        )
        self.door: RouterDoor[WorkerToInference] = RouterDoor(WorkerToInference, self.keys, directory / "i.sock")
        self.line: AgentLine[CoordinatorToInference] = AgentLine(
            CoordinatorToInference,
            self.keys,
            "inference-0",
            lambda: self.coordinator.door.ipc,
            heartbeat_s=0.05,
            lost_after_s=2.0,
        )
        self.ref = ServerRef("inference-0", "here", self.door.ipc, self.door.tcp)
        self.stop = asyncio.Event()
        self.welcomed = asyncio.Event()
        agent = InferenceAgent(self.ref, config, engine, self.door, self.line)
        self.running = asyncio.create_task(agent.run(self.stop, self.welcomed.set))

    def worker(self, **patience: float) -> LLMClient:
        return LLMClient("here", self.keys, "worker-0", **patience)

    def in_engine(self) -> int:
        return len(self.engine._running)


@asynccontextmanager
async def open_site(directory: Path, engine: ScriptedEngine, slots: int = 4) -> AsyncIterator[Site]:
    site = Site(directory, engine, slots)
    try:
        yield site
    finally:
        site.stop.set()
        await asyncio.gather(site.running, return_exceptions=True)
        site.line.close()
        site.door.close()
        site.coordinator.close()


async def test_hello_heartbeats_and_goodbye(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine()) as site:
        hello = await site.coordinator.next(InferenceHello)
        assert (hello.server, hello.weight_version, hello.engine) == (site.ref, 0, "scripted")
        await asyncio.wait_for(site.welcomed.wait(), PATIENCE_S)
        load = await site.coordinator.next(ServerLoad)
        assert load.healthy and load.server_id == "inference-0"
        site.stop.set()
        assert await site.running == "told to stop"
        await site.coordinator.next(Goodbye)


async def test_a_worker_gets_what_the_engine_wrote(socket_dir: Path) -> None:
    engine = ScriptedEngine({(1, 2): [7, 8, 9]})
    async with open_site(socket_dir, engine) as site:
        worker = site.worker()
        llms = [worker.for_rollout(site.ref, f"r{i}") for i in range(20)]
        answers = await asyncio.gather(*(llm.generate([1, 2], SamplingParams()) for llm in llms))
        for answer in answers:
            assert answer.token_ids == [7, 8, 9]
            assert answer.logprobs == scripted_scores([2, 7, 8, 9], 0)
            assert answer.finish_reason is FinishReason.STOP
        with pytest.raises(InferenceError, match="no reply to the prompt"):
            await llms[0].generate([3], SamplingParams())
        await worker.close()


async def test_cancelling_a_generate_frees_the_engine(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine(endless)) as site:
        worker = site.worker()
        task = asyncio.create_task(worker.for_rollout(site.ref, "r").generate([1], ENDLESS))
        await until(lambda: site.in_engine() == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: site.in_engine() == 0)
        await worker.close()


async def test_no_more_than_the_slots_are_in_the_engine_and_the_urgent_go_first(socket_dir: Path) -> None:
    entered: list[int] = []

    def reply(token_ids: Any, sampling: SamplingParams) -> Any:
        entered.append(token_ids[0])
        return range(sampling.max_tokens)

    async with open_site(socket_dir, ScriptedEngine(reply), slots=2) as site:
        worker = site.worker()

        def start(first: int, priority: int, sampling: SamplingParams = ENDLESS) -> asyncio.Task[Any]:
            return asyncio.create_task(worker.for_rollout(site.ref, "r", priority).generate([first], sampling))

        holders = [start(1, 50), start(1, 50)]
        await until(lambda: site.in_engine() == 2)
        short = SamplingParams(max_tokens=1)
        queued = [start(first, first, short) for first in (9, 5, 7)]
        given_up = start(3, 0)
        await site.coordinator.next(ServerLoad, lambda load: load.waiting == 4 and load.running == 2)
        given_up.cancel()
        await site.coordinator.next(ServerLoad, lambda load: load.waiting == 3)
        holders[0].cancel()
        await asyncio.gather(*queued)
        assert entered == [1, 1, 5, 7, 9]
        holders[1].cancel()
        await asyncio.gather(*holders, given_up, return_exceptions=True)
        await worker.close()


async def test_a_worker_that_vanishes_is_not_generated_for(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine(endless)) as site:
        line: DealerLine[InferenceToWorker] = DealerLine(InferenceToWorker, site.keys, site.ref.ipc, "worker-x")
        await line.send(Generate("q", "r", [1], ENDLESS))
        await until(lambda: site.in_engine() == 1)
        line.close()
        await until(lambda: site.in_engine() == 0)


async def test_a_worker_that_waits_long_keeps_its_request(socket_dir: Path) -> None:
    """Pings keep it alive, far beyond lost_after_s."""
    async with open_site(socket_dir, ScriptedEngine(lambda ids, sampling: range(60), token_s=0.1)) as site:
        worker = site.worker(ping_s=0.2)
        answer = await worker.for_rollout(site.ref, "r").generate([1], SamplingParams())
        assert len(answer.token_ids) == 60
        await worker.close()


async def test_an_agent_that_is_gone_fails_what_waits_for_it(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine(endless)) as site:
        worker = site.worker(ping_s=0.1, lost_after_s=0.5)
        task = asyncio.create_task(worker.for_rollout(site.ref, "r").generate([1], ENDLESS))
        await until(lambda: site.in_engine() == 1)
        site.running.cancel()  # as if it were killed, but for the farewell
        with pytest.raises(InferenceError):
            await task
        silent = asyncio.create_task(worker.for_rollout(site.ref, "r2").generate([1], ENDLESS))
        with pytest.raises(InferenceError, match="has not answered"):
            await silent
        await worker.close()


async def test_stopping_the_agent_answers_what_is_under_way(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine(endless)) as site:
        worker = site.worker()
        task = asyncio.create_task(worker.for_rollout(site.ref, "r").generate([1], ENDLESS))
        await until(lambda: site.in_engine() == 1)
        await site.coordinator.next(InferenceHello)
        await site.coordinator.send(Shutdown("done"))
        with pytest.raises(InferenceError, match="being stopped"):
            await task
        assert await site.running == "the coordinator ends the run: done"
        await worker.close()


async def test_weight_updates_are_applied_checked_and_answered(socket_dir: Path) -> None:
    ids = [3, 1, 4, 1, 5]
    async with open_site(socket_dir, ScriptedEngine()) as site:
        await site.coordinator.next(InferenceHello)
        await site.coordinator.send(WeightUpdate(5, [], WeightProbe(ids, scripted_scores(ids, 5), 1e-6)))
        done = await site.coordinator.next(WeightUpdated)
        assert (done.version, done.error, done.probe_gap) == (5, "", 0.0)
        load = await site.coordinator.next(ServerLoad)
        assert load.healthy and load.weight_version == 5

        await site.coordinator.send(WeightUpdate(6, [], WeightProbe(ids, scripted_scores(ids, 5), 1e-6)))
        refused = await site.coordinator.next(WeightUpdated)
        assert "does not serve the trainer's weights" in refused.error
        load = await site.coordinator.next(ServerLoad)
        assert not load.healthy and "trainer's weights" in load.detail

        await site.coordinator.send(WeightUpdate(6, []))
        assert (await site.coordinator.next(WeightUpdated)).error == ""
        assert (await site.coordinator.next(ServerLoad)).healthy


async def test_an_engine_that_lost_its_weights_says_hello_again(socket_dir: Path) -> None:
    engine = ScriptedEngine()
    async with open_site(socket_dir, engine) as site:
        await site.coordinator.next(InferenceHello)
        await site.coordinator.send(WeightUpdate(5, []))
        await site.coordinator.next(WeightUpdated)
        engine.weight_version = 0  # it was started anew
        assert (await site.coordinator.next(InferenceHello)).weight_version == 0
        assert (await site.coordinator.next(ServerLoad)).weight_version == 0


async def test_an_engine_that_is_down_for_good_ends_the_agent(socket_dir: Path) -> None:
    engine = ScriptedEngine()
    async with open_site(socket_dir, engine) as site:
        await site.coordinator.next(InferenceHello)
        engine.break_down("out of memory in layer 3")
        with pytest.raises(RunError, match="out of memory in layer 3"):
            await asyncio.wait_for(site.running, PATIENCE_S)


async def test_a_coordinator_that_is_gone_ends_the_agent(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine()) as site:
        await site.coordinator.next(ServerLoad)
        site.coordinator._task.cancel()
        with pytest.raises(RunError, match="has not been heard"):
            await asyncio.wait_for(site.running, PATIENCE_S)
