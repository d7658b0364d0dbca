"""A coordinator over the attempts of a run; agents speak the real protocol over real ZeroMQ."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from service_run import service_run, until

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult, BatchSpec, BatchState, GroupFilter
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import FailureKind, RolloutSpec, Status
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.service.client import RolloutClient


def order(batch_id: str, groups: int = 2) -> BatchSpec:
    rows = [{"id": f"{batch_id}-r{i}"} for i in range(groups)]
    return BatchSpec(batch_id, "t", rows, groups, 4, filter=GroupFilter.ALL, client="trainer")


def weights(version: int) -> WeightUpdate:
    return WeightUpdate(version, [f"/w/{version}"])


async def test_the_next_attempt_ends_the_batch_that_was_cut_off(tmp_path: Path) -> None:
    async with service_run(tmp_path, retries=0) as run, run.client() as client:
        worker = await run.worker()
        worker.slow = {"b.g0.s3", "b.g1.s0"}
        await run.server()
        await client.update_weights(weights(5))
        await client.submit_batch(order("b"))
        await until(lambda: set(worker.running) == worker.slow and not worker.unacknowledged)
    async with service_run(tmp_path, attempt=2, retries=0) as run, run.client() as client:
        worker = await run.worker()
        server = await run.server()
        assert (await client.batch_progress("b")).rollouts_done == 6
        assert {p.status for p in await client.list_rollouts(batch_id="b") if not p.status.terminal} == {Status.QUEUED}
        await asyncio.sleep(0.4)
        assert worker.started == [], "not with the weights that an engine starts with"
        assert await client.update_weights(weights(3)), "of an older checkpoint"
        assert server.got == [weights(3)]
        await asyncio.sleep(0.4)
        assert worker.started == [], "the trainer is not at this batch again"
        await client.submit_rollouts([RolloutSpec("a", "t", {})])
        assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).status is Status.DONE
        await client.submit_batch(order("b"))
        result = await asyncio.wait_for(client.wait_batch("b"), 10)
        assert sorted(worker.started) == ["a", "b.g0.s3#2", "b.g1.s0#2"]
        status = await client.status()
        assert status.rollouts["done"] == 9
    rollouts = [r for group in result.groups for r in group.rollouts]
    assert {(r.status, r.attempts) for r in rollouts} == {(Status.DONE, 1)}


async def test_waiting_for_a_batch_wakes_it_and_so_does_cancelling(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker()
        worker.may_run.clear()
        await run.server()
        await client.update_weights(weights(1))
        await client.submit_batch(order("b"))
        await client.submit_batch(order("c"))
        await until(lambda: len(worker.running) > 0)
    async with service_run(tmp_path, attempt=2) as run, run.client() as client:
        await run.worker()
        await run.server()
        await client.update_weights(weights(1))
        assert (await client.cancel_batch("c")).state is BatchState.CANCELLED
        assert (await asyncio.wait_for(client.wait_batch("b"), 10)).progress.rollouts_done == 8


async def test_without_weights_of_its_own_trainer_a_batch_goes_on_at_once(tmp_path: Path) -> None:
    async with service_run(tmp_path, heartbeat_s=5.0, lost_after_s=60.0) as run, run.client() as client:
        worker = await run.worker()
        worker.may_run.clear()
        await run.server()
        await client.submit_batch(order("b"))
        await until(lambda: len(worker.running) == 8)
    async with service_run(tmp_path, attempt=2, heartbeat_s=5.0, lost_after_s=60.0) as run:
        worker = await run.worker()
        await run.server()
        await until(lambda: len(worker.started) == 8)  # the heartbeat is long: nobody is waited for
        assert all(name.endswith("#2") for name in worker.started)


async def test_a_drain_lets_what_is_under_way_end_and_says_so(tmp_path: Path) -> None:
    marker = tmp_path / "DRAINED"
    async with service_run(tmp_path, retries=0) as run, run.client() as client:
        worker = await run.worker()
        worker.slow = {"b.g0.s0"}
        await run.server()
        await client.submit_batch(order("b"))
        await until(lambda: set(worker.running) == worker.slow)
        run.drain.set()
        await until(lambda: run.coordinator.status().draining)
        await client.submit_rollouts([RolloutSpec("late", "t", {})])
        assert (await client.resume()).draining and not (await client.status()).paused
        await asyncio.sleep(0.3)
        assert not marker.exists()
        worker.slow = set()
        await until(marker.exists)
        assert len(worker.started) == 8
        assert (await asyncio.wait_for(client.wait_batch("b"), 10)).progress.rollouts_done == 8
    marker.unlink()
    async with service_run(tmp_path, attempt=2) as run, run.client() as client:
        assert not (await client.status()).draining and not (await client.status()).paused
        run.drain.set()
        await until(marker.exists)  # nothing is under way


async def test_agents_that_leave_or_break_while_draining_cost_no_retry(tmp_path: Path) -> None:
    async with service_run(tmp_path, retries=0) as run, run.client() as client:
        worker, other = await run.worker("w0"), await run.worker("w1")
        worker.may_run.clear()
        other.may_run.clear()
        await run.server()
        await client.submit_batch(order("b"))
        await until(lambda: len(worker.running) + len(other.running) == 8)
        await other.leave()  # told to go before the coordinator has heard of the end
        run.drain.set()
        await until(lambda: run.coordinator.status().draining)
        worker.breaks = lambda spec, stage: FailureKind.INFERENCE
        worker.may_run.set()
        await until((tmp_path / "DRAINED").exists)
        assert (await client.batch_progress("b")).rollouts_failed == 0
    async with service_run(tmp_path, attempt=2, retries=0) as run, run.client() as client:
        await run.worker()
        await run.server()
        result = await asyncio.wait_for(client.wait_batch("b"), 10)
    assert {(r.status, r.attempts) for g in result.groups for r in g.rollouts} == {(Status.DONE, 1)}


STEPS = 8


class Trainer:
    """Trains by the book; ``checkpoint`` is where the next one goes on, perhaps some steps behind."""

    def __init__(self) -> None:
        self.checkpoint = 0
        self.trained: dict[int, BatchResult] = {}

    async def train(self, client: RolloutClient, chance: random.Random) -> None:
        step = self.checkpoint
        while step < STEPS:
            await client.update_weights(weights(step + 1))
            await client.submit_batch(order(f"step-{step + 1}", 4))
            result = await client.wait_batch(f"step-{step + 1}")
            step += 1
            assert self.trained.setdefault(step, result) == result
            if chance.random() < 0.5:
                self.checkpoint = step


async def test_twenty_attempts_in_a_row(tmp_path: Path) -> None:
    chance, trainer, started = random.Random(20), Trainer(), []
    attempt = 0
    while len(trainer.trained) < STEPS or attempt < 20:
        attempt += 1
        async with service_run(tmp_path, attempt=attempt, retries=0) as run, run.client() as client:
            workers = [await run.worker(f"w{n}") for n in range(2)]
            await run.server()
            for worker in workers:
                worker.slow = {f"step-{s}.g{g}.s{n}" for s in range(9) for g in range(4) for n in range(4)}
                worker.slow = {name for name in worker.slow if chance.random() < 0.3}
            training = asyncio.create_task(trainer.train(client, chance))
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            if chance.random() < 0.5:
                run.drain.set()
                await asyncio.sleep(chance.uniform(0.0, 0.05))
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            started += [name for worker in workers for name in worker.started]
        assert attempt < 200, trainer.trained.keys()
    assert len(started) == len(set(started)), "an attempt had the name of another"
    rollouts = [r for result in trainer.trained.values() for g in result.groups for r in g.rollouts]
    assert {(r.status, r.attempts) for r in rollouts} == {(Status.DONE, 1)}
    stored = read_rollouts(RunDirectory(tmp_path), ["rollout_id", "batch_id"]).to_pylist()
    assert sorted(row["rollout_id"] for row in stored) == sorted(r.rollout_id for r in rollouts)
    assert len(rollouts) == 16 * STEPS
