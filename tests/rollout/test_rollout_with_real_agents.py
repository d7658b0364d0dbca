"""The rollout service with the real processes of a run, killed and started again."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from real_run import RealRun

from prorl_hpc.messages.batch import BatchState
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import Status
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.rollout.epoch import begin_new_epoch
from prorl_hpc.service.client import RolloutClient

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[RealRun]:
    made = RealRun(tmp_path)
    await made.ready()
    yield made
    made.end()


async def test_batches_flow_and_a_killed_worker_loses_none(real: RealRun) -> None:
    async with real.client(patience_s=1) as client:
        await client.submit_batch(real.order("first"))
        first = await client.wait_batch("first")
        rollouts = [r for group in first.groups for r in group.rollouts]
        assert {r.status for r in rollouts} == {Status.DONE}
        assert {r.worker for r in rollouts} == {"worker-0", "worker-1"}
        assert all(r.trajectory.num_trained_tokens > 0 for r in rollouts)

        await client.submit_batch(real.order("second"))
        while (await client.batch_progress("second")).rollouts_done == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        real.children["worker-1"].kill()
        second = await asyncio.wait_for(client.wait_batch("second"), 60)
        assert second.progress.state is BatchState.DONE
        assert {r.status for group in second.groups for r in group.rollouts} == {Status.DONE}

        await client.submit_batch(real.order("third"))
        waiting = asyncio.create_task(client.wait_batch("third"))
        await asyncio.sleep(0)
        real.children["coordinator"].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(real.children["coordinator"].wait, 20) == 0
        with pytest.raises(ServiceError):
            await waiting
        for name in ("worker-0", "inference-0"):
            assert await asyncio.to_thread(real.children[name].wait, 20) == 0, real.run.process_log(name).read_text()
    table = read_rollouts(real.run, ["batch_id", "status"])
    assert table.num_rows == 96


async def test_killed_processes_that_are_started_again_lose_and_repeat_nothing(real: RealRun) -> None:
    async with real.client(patience_s=60) as client:
        await client.submit_batch(real.order("b", 64))

        async def until_done(rollouts: int) -> None:
            while (await client.batch_progress("b")).rollouts_done < rollouts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        for done, name in ((20, "coordinator"), (60, "worker-0"), (100, "coordinator"), (140, "worker-1")):
            await until_done(done)
            await real.kill(name)
            real.start(name)
        streamed: list[str] = []
        result = await asyncio.wait_for(client.wait_batch("b"), 120)
        async for numbered in client.stream(follow=False):
            streamed.append(numbered.result.rollout_id)
    assert result.progress.state is BatchState.DONE
    rollouts = [r for group in result.groups for r in group.rollouts]
    assert Counter(r.status for r in rollouts) == {Status.DONE: 256}
    assert Counter(streamed) == Counter(r.rollout_id for r in rollouts)
    assert all(r.trajectory.num_trained_tokens > 0 for r in rollouts)
    real.children["coordinator"].terminate()
    assert await asyncio.to_thread(real.children["coordinator"].wait, 20) == 0
    assert sorted(read_rollouts(real.run, ["rollout_id"])["rollout_id"].to_pylist()) == sorted(streamed)


async def until_some_are_done(client: RolloutClient, count: int) -> None:
    while (await client.batch_progress("b")).rollouts_done < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_the_next_attempt_goes_on_and_a_fresh_one_starts_with_free_ids(real: RealRun) -> None:
    async with real.client(patience_s=60) as client:
        await client.submit_batch(real.order("b", 64))
        await until_some_are_done(client, 10)
        real.children["coordinator"].send_signal(signal.SIGUSR1)
        while not real.run.drained_marker.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        done = (await client.batch_progress("b")).rollouts_done
        await asyncio.sleep(0.3)
        assert (await client.batch_progress("b")).rollouts_done == done < 256
        assert (await client.status()).draining
    await real.next_attempt()
    async with real.client(patience_s=60) as client:
        await until_some_are_done(client, done + 10)
    await real.next_attempt()  # cut off without a word
    async with real.client(patience_s=60) as client:
        result = await asyncio.wait_for(client.wait_batch("b"), 60)
        rollouts = [r for group in result.groups for r in group.rollouts]
        assert Counter((r.status, r.attempts) for r in rollouts) == {(Status.DONE, 1): 256}
        numbered = [n async for n in client.stream(follow=False)]
        assert Counter(n.result.rollout_id for n in numbered) == Counter(r.rollout_id for r in rollouts)
    begin_new_epoch(real.run)
    await real.next_attempt()
    async with real.client(patience_s=60) as client:
        with pytest.raises(ServiceError) as unknown:
            await client.batch_progress("b")
        assert unknown.value.status == 404
        await client.submit_batch(real.order("b", 2))
        assert (await asyncio.wait_for(client.wait_batch("b"), 60)).progress.accepted == 2
    real.children["coordinator"].terminate()
    assert await asyncio.to_thread(real.children["coordinator"].wait, 20) == 0
    assert read_rollouts(real.run, ["rollout_id"]).num_rows == 256 + 8  # what was made before is kept


async def test_an_inference_agent_that_is_started_again_gets_the_newest_weights(real: RealRun, tmp_path: Path) -> None:
    update = WeightUpdate(4, [str(tmp_path / "model.safetensors")])
    async with real.client(patience_s=60) as client:
        assert [answer.error for answer in await client.update_weights(update)] == [""]
        await client.submit_batch(real.order("b", 64))
        await until_some_are_done(client, 20)
        await real.kill("inference-0")
        real.start("inference-0")
        result = await asyncio.wait_for(client.wait_batch("b"), 120)
        (server,) = await client.servers()
        assert (server.weight_version, server.healthy) == (4, True)
    rollouts = [r for group in result.groups for r in group.rollouts]
    assert {r.status for r in rollouts} == {Status.DONE}
    versions = {s.weight_version for r in rollouts for s in r.trajectory.segments if s.trained}
    assert versions == {4}, "nothing was generated by the weights that the engine starts with"
