"""The inference agent between a coordinator and workers, over real ZeroMQ, with an engine that follows a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_site import ENDLESS, PATIENCE_S, Coordinator, Site, endless, open_site
from waiting import until

from prorl_hpc.inference.scripted_engine import ScriptedEngine, scripted_scores
from prorl_hpc.messages.control import Goodbye, InferenceHello, ServerLoad, Shutdown
from prorl_hpc.messages.errors import InferenceError, RunError
from prorl_hpc.messages.inference import (
    FinishReason,
    Generate,
    InferenceToWorker,
    WeightProbe,
    WeightUpdate,
    WeightUpdated,
)
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.channels import DealerLine


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
        site.coordinator.fall_silent()
        with pytest.raises(RunError, match="has not been heard"):
            await asyncio.wait_for(site.running, PATIENCE_S)


class SlowToLoad(ScriptedEngine):
    """Loads weights when it is let go, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.loaded: list[int] = []

    async def update_weights(self, update: WeightUpdate) -> None:
        await self.go.wait()
        self.loaded.append(update.version)
        await super().update_weights(update)


async def replaced(site: Site[Any], path: Path) -> Coordinator:
    """The coordinator dies, and another one takes its place at ``path``."""
    site.coordinator.close()
    site.coordinator = Coordinator(site.keys, path)
    return site.coordinator


@pytest.mark.parametrize("socket", ["inference-0-c.sock", "elsewhere.sock"])
async def test_a_coordinator_that_was_started_anew_is_greeted_and_answered(socket_dir: Path, socket: str) -> None:
    engine = SlowToLoad()
    async with open_site(socket_dir, engine) as site:
        first = await site.coordinator.next(InferenceHello)
        await site.coordinator.send(WeightUpdate(3, []))
        await site.coordinator.next(ServerLoad)
        coordinator = await replaced(site, socket_dir / socket)
        again = await coordinator.next(InferenceHello)
        assert (again.instance, again.weight_version) == (first.instance, 0)
        await coordinator.send(WeightUpdate(3, []))  # it asks again, since the Hello says an older version
        engine.go.set()
        assert (await coordinator.next(WeightUpdated)).error == ""
        assert (await coordinator.next(ServerLoad)).weight_version == 3
        await coordinator.send(WeightUpdate(3, []))
        assert (await coordinator.next(WeightUpdated)).error == ""
        assert engine.loaded == [3]


async def test_weights_that_were_not_proved_are_asked_for_again(socket_dir: Path) -> None:
    ids = [3, 1, 4]
    async with open_site(socket_dir, ScriptedEngine()) as site:
        await site.coordinator.next(InferenceHello)
        await site.coordinator.send(WeightUpdate(1, []))
        await site.coordinator.next(WeightUpdated)
        wrong = WeightUpdate(2, [], WeightProbe(ids, scripted_scores(ids, 1), 1e-6))
        await site.coordinator.send(wrong)
        assert (await site.coordinator.next(WeightUpdated)).error
        coordinator = await replaced(site, socket_dir / "elsewhere.sock")
        assert (await coordinator.next(InferenceHello)).weight_version == 1
        await coordinator.send(wrong)
        assert (await coordinator.next(WeightUpdated)).error


async def test_an_agent_that_was_started_anew_is_another_instance(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine()) as site:
        first = await site.coordinator.next(InferenceHello)
        await site.die()
        async with open_site(socket_dir, ScriptedEngine(), keys=site.keys) as other:
            second = await other.coordinator.next(InferenceHello)
            assert second.server == first.server and second.instance != first.instance
