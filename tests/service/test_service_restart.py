"""A coordinator that goes on with what an earlier one had; agents speak the real protocol over real ZeroMQ."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from service_run import TRAJECTORY, FakeWorker, ServiceRun, service_run, until

from prorl_hpc.messages.batch import BatchSpec, BatchState, GroupFilter, GroupOutcome, WhenFull
from prorl_hpc.messages.control import Pools
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import RolloutSpec, Status


def order(batch_id: str = "b", **changes: object) -> BatchSpec:
    rows = [{"id": f"{batch_id}-r{i}"} for i in range(8)]
    values: dict[str, object] = {"task": "t", "rows": rows, "groups_wanted": 2, "group_size": 4}
    return BatchSpec(batch_id, **(values | changes))  # type: ignore[arg-type]


async def back(run: ServiceRun, worker: FakeWorker) -> None:
    """A worker of an earlier coordinator speaks to this one."""
    worker.rejoin(run.door.ipc)
    await run.resume(worker.worker_id, worker)


async def test_results_that_were_made_are_not_made_again_and_what_runs_goes_on(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker()
        worker.slow = {"b.g0.s3", "b.g1.s0"}
        await run.server()
        await client.submit_batch(order())
        await until(lambda: set(worker.running) == worker.slow and not worker.unacknowledged)
    async with service_run(tmp_path) as run, run.client() as client:
        assert (await client.batch_progress("b")).rollouts_done == 6
        await back(run, worker)
        await run.server()
        await until(lambda: run.coordinator.status().rollouts["run"] == 2)
        assert worker.discarded == []
        worker.slow = set()
        result = await asyncio.wait_for(client.wait_batch("b"), 10)
    assert result.progress.state is BatchState.DONE
    rollouts = [r for group in result.groups for r in group.rollouts]
    assert {(r.status, r.attempts) for r in rollouts} == {(Status.DONE, 1)}
    assert all(r.trajectory == TRAJECTORY for r in rollouts)
    assert len(worker.started) == len(set(worker.started)) == 8  # nothing was started twice


async def test_last_reports_that_nobody_heard_are_heard_after_the_restart(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker()
        worker.may_eval.clear()
        await run.server()
        await client.submit_batch(order())
        await until(lambda: len([s for s in worker.running.values() if s == "eval"]) == 4)
    worker.may_eval.set()
    await until(lambda: len(worker.unacknowledged) == 4)  # told to nobody
    async with service_run(tmp_path) as run, run.client() as client:
        await back(run, worker)
        await run.server()
        result = await asyncio.wait_for(client.wait_batch("b"), 10)
        await until(lambda: not worker.unacknowledged)
    assert {r.attempts for group in result.groups for r in group.rollouts} == {1}
    assert len(worker.started) == len(set(worker.started))


async def test_without_its_worker_a_rollout_starts_elsewhere_after_the_grace(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        gone = await run.worker("w0")
        gone.may_run.clear()
        await run.server()
        await client.submit_rollouts([RolloutSpec("a", "t", {})])
        await until(lambda: "a" in gone.ran_on)
    async with service_run(tmp_path) as run, run.client() as client:
        await run.worker("w1")
        await run.server()
        assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).worker == "w1"
        await back(run, gone)  # too late
        await until(lambda: gone.discarded == ["a"])
        assert (await client.get_rollout("a")).worker == "w1"


async def test_another_job_starts_with_free_ids(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker()
        await run.server()
        await client.submit_batch(order("done"))
        await client.wait_batch("done")
        worker.may_run.clear()
        await client.submit_batch(order("open"))
    async with service_run(tmp_path, epoch="another") as run, run.client() as client:
        assert await client.list_batches() == []
        with pytest.raises(ServiceError) as unknown:
            await client.batch_progress("open")
        assert unknown.value.status == 404
        await run.worker()
        await run.server()
        await client.submit_batch(order("done", group_size=2))
        assert (await asyncio.wait_for(client.wait_batch("done"), 10)).progress.accepted == 2


async def test_a_pause_outside_servers_and_weights_are_remembered(tmp_path: Path) -> None:
    update = WeightUpdate(3, ["/w/3.safetensors"])
    async with service_run(tmp_path) as run, run.client() as client:
        await run.server()
        await client.update_weights(update)
        assert (await client.pause()).paused
        assert (await client.pause("trainer", 600.0)).holds
    async with service_run(tmp_path) as run, run.client() as client:
        assert (await client.status()).paused
        assert not (await client.status()).holds, "who asked for it may be gone as well"
        late = await run.server("late")
        await until(lambda: late.got == [update])
        worker = await run.worker()
        await client.submit_rollouts([RolloutSpec("a", "t", {})])
        await asyncio.sleep(0.5)
        assert not worker.started
        assert not (await client.resume()).paused
        assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).status is Status.DONE


def carrying(batch_id: str, **changes: object) -> BatchSpec:
    return order(batch_id, when_full=WhenFull.CARRY, groups_wanted=1, filter=GroupFilter.ALL, **changes)


@pytest.mark.parametrize("restart", [False, True])
async def test_groups_are_carried_into_the_next_batch_with_all_that_they_have(tmp_path: Path, restart: bool) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker(pools=Pools(16, 16, 16, 16))
        worker.slow = {"first.g1.s3", "first.g2.s0"}
        await run.server()
        await client.submit_batch(carrying("first", max_parallel_groups=3))
        first = await asyncio.wait_for(client.wait_batch("first"), 10)
        outcomes = {g.row_index: g.outcome for g in first.groups}
        assert outcomes == {0: GroupOutcome.ACCEPTED, 1: GroupOutcome.CARRIED, 2: GroupOutcome.CARRIED}
        assert [len(g.rollouts) for g in first.groups] == [4, 0, 0]
        await until(lambda: set(worker.running) == worker.slow)
        if not restart:
            await finish_the_second(run, worker)
    if restart:
        async with service_run(tmp_path) as run:
            await back(run, worker)
            await run.server()
            await finish_the_second(run, worker)


async def finish_the_second(run: ServiceRun, worker: FakeWorker) -> None:
    async with run.client() as client:
        progress = await client.submit_batch(carrying("second", max_parallel_groups=2))
        assert (progress.carried_in, progress.state) == (2, BatchState.RUNNING)
        slow, worker.slow = worker.slow, set()
        second = await asyncio.wait_for(client.wait_batch("second"), 10)
        carried = [group for group in second.groups if group.carried_from]
        assert {group.carried_from for group in carried} == {"first"}
        whole = [group for group in carried if group.outcome is GroupOutcome.ACCEPTED]
        assert whole and all(len(group.rollouts) == 4 for group in whole)
        assert all(r.trajectory == TRAJECTORY for group in whole for r in group.rollouts)
        assert {p.batch_id for p in await client.list_rollouts(batch_id="second")} == {"second"}
        assert len(worker.started) == len(set(worker.started))
        assert slow <= set(worker.started)


async def test_a_batch_that_is_refused_takes_no_groups_over(tmp_path: Path) -> None:
    async with service_run(tmp_path) as run, run.client() as client:
        worker = await run.worker(pools=Pools(16, 16, 16, 16))
        worker.slow = {"first.g1.s3"}
        await run.server()
        await client.submit_rollouts([RolloutSpec("taken.g0.s0", "t", {})])
        await client.submit_batch(carrying("first", max_parallel_groups=2))
        await asyncio.wait_for(client.wait_batch("first"), 10)
        with pytest.raises(ServiceError) as refused:
            await client.submit_batch(carrying("taken"))
        assert refused.value.code == "batch_differs"
        assert (await client.submit_batch(carrying("second"))).carried_in == 1
        worker.slow = set()
        second = await asyncio.wait_for(client.wait_batch("second"), 10)
        assert [(g.carried_from, g.outcome, len(g.rollouts)) for g in second.groups][:1] == [
            ("first", GroupOutcome.ACCEPTED, 4)
        ]


async def test_a_status_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status.json").mkdir()
    async with service_run(tmp_path) as run, run.client() as client:
        await until(lambda: "the status of the run cannot be shown" in caplog.text)
        await run.worker()
        await run.server()
        await client.submit_rollouts([RolloutSpec("a", "t", {})])
        assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).status is Status.DONE
