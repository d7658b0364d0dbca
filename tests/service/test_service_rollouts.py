"""The whole service: client, HTTP, coordinator, ZeroMQ, with fake agents at the far end."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from service_run import ServiceRun, service_run, until

from prorl_hpc.messages.batch import BatchProgress, BatchSpec, BatchState, GroupOutcome
from prorl_hpc.messages.control import Pools
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import FailureKind, RolloutSpec, Stage, Status
from prorl_hpc.messages.status import RunStatus
from prorl_hpc.service.client import RolloutClient


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[ServiceRun]:
    async with service_run(tmp_path) as made:
        yield made


@pytest.fixture
async def client(run: ServiceRun) -> AsyncIterator[RolloutClient]:
    async with run.client(patience_s=5) as made:
        yield made


def order(batch_id: str = "b", **changes: object) -> BatchSpec:
    rows = [{"id": f"r{i}"} for i in range(8)]
    values: dict[str, object] = {"task": "t", "rows": rows, "groups_wanted": 2, "group_size": 4}
    return BatchSpec(batch_id, **(values | changes))  # type: ignore[arg-type]


async def test_a_batch_with_uniform_groups_replaced(run: ServiceRun, client: RolloutClient) -> None:
    dull = {"r0", "r2"}
    await run.worker(reward=lambda spec: 1.0 if spec.row["id"] in dull else float(spec.sample % 2))
    await run.server()
    assert (await client.submit_batch(order())).state is BatchState.RUNNING
    result = await asyncio.wait_for(client.wait_batch("b"), 10)
    outcomes = {group.row_index: group.outcome for group in result.groups}
    assert outcomes == {i: GroupOutcome.UNIFORM if f"r{i}" in dull else GroupOutcome.ACCEPTED for i in range(4)}
    assert (result.progress.state, result.progress.rows_used) == (BatchState.DONE, 4)
    rollout = result.groups[1].rollouts[1]
    assert (rollout.rollout_id, rollout.reward, rollout.row_id) == ("b.g1.s1", 1.0, "r1")
    assert rollout.trajectory.token_ids == [1, 2, 3]
    assert (rollout.worker, rollout.server, rollout.metrics) == ("w0", "s0", {"turns": 2.0})
    assert [timing.stage for timing in rollout.timings] == list(Stage)
    written = run.rollouts / "b.parquet"
    await until(written.exists)
    assert pq.read_table(written)["rollout_id"].to_pylist() == [r.rollout_id for g in result.groups for r in g.rollouts]
    assert await client.wait_batch("b") == result  # read back from there


async def test_the_same_order_again_is_the_same_batch(run: ServiceRun, client: RolloutClient) -> None:
    await run.worker()
    await run.server()
    await client.submit_batch(order())
    first = await client.wait_batch("b")
    assert await client.submit_batch(order()) == first.progress
    assert await client.wait_batch("b") == first
    with pytest.raises(ServiceError) as refused:
        await client.submit_batch(order(group_size=3))
    assert (refused.value.status, refused.value.code) == (409, "batch_differs")


async def test_rollouts_of_a_worker_that_vanished_are_run_elsewhere(run: ServiceRun, client: RolloutClient) -> None:
    lost = await run.worker("w0")
    lost.may_run.clear()
    await run.server()
    await client.submit_batch(order())
    await until(lambda: len(lost.ran_on) == 8)
    await run.vanish("w0")
    await run.worker("w1")
    result = await asyncio.wait_for(client.wait_batch("b"), 10)
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    assert {(r.status, r.worker, r.attempts) for r in rollouts} == {(Status.DONE, "w1", 2)}
    assert [worker.worker_id for worker in (await client.status()).workers] == ["w1"]


async def test_a_worker_that_comes_back_is_told_to_drop_its_stale_work(run: ServiceRun, client: RolloutClient) -> None:
    silent = await run.worker("w0")
    silent.may_run.clear()
    await run.server()
    await client.submit_batch(order())
    await until(lambda: len(silent.ran_on) == 8)
    await run.vanish("w0")
    held = sorted(silent.specs)
    await run.worker("w1")
    await asyncio.wait_for(client.wait_batch("b"), 10)
    silent.welcomed.clear()
    await run.resume("w0", silent)
    await until(lambda: sorted(silent.discarded) == held)
    silent.may_run.set()
    assert (await client.wait_batch("b")).progress.rollouts_done == 8


async def test_sandbox_faults_are_retried_elsewhere_and_task_faults_are_not(
    run: ServiceRun, client: RolloutClient
) -> None:
    await run.worker("w0", breaks=lambda spec, stage: FailureKind.SANDBOX if stage is Stage.INIT else None)
    await run.server()
    spec = RolloutSpec("r", "t", {"id": "x"})
    await client.submit_rollouts([spec])
    await run.worker(
        "w1", breaks=lambda spec, stage: FailureKind.TASK if spec.rollout_id == "bad" and stage is Stage.RUN else None
    )
    result = await asyncio.wait_for(client.wait_rollout("r"), 10)
    # With no other worker in time it was tried on w0 to the end; with w1 there it was not.
    assert (result.worker, result.status) in {("w1", Status.DONE), ("w0", Status.FAILED)}
    await client.submit_rollouts([RolloutSpec(f"r{i}", "t", {}) for i in range(4)])
    for i in range(4):
        assert (await asyncio.wait_for(client.wait_rollout(f"r{i}"), 10)).worker == "w1"
    await run.vanish("w0")
    await until(lambda: len(run.coordinator.status().workers) == 1)
    await client.submit_rollouts([RolloutSpec("bad", "t", {})])
    broken = await asyncio.wait_for(client.wait_rollout("bad"), 10)
    assert (broken.status, broken.attempts, broken.reward) == (Status.FAILED, 1, None)
    assert broken.failure is not None and broken.failure.kind is FailureKind.TASK
    assert broken.trajectory.token_ids == [1, 2, 3]


async def test_rollouts_of_a_server_that_vanished_are_run_on_another(run: ServiceRun, client: RolloutClient) -> None:
    worker = await run.worker()
    worker.may_run.clear()
    await run.server("s0")
    await client.submit_batch(order())
    await until(lambda: len(worker.ran_on) == 8)
    await run.vanish("s0")
    await run.server("s1")
    await until(lambda: [server.server_id for server in run.coordinator.status().servers] == ["s1"])
    worker.may_run.set()
    result = await asyncio.wait_for(client.wait_batch("b"), 10)
    rollouts = [r for group in result.groups for r in group.rollouts]
    assert {(r.status, r.server, r.attempts) for r in rollouts} == {(Status.DONE, "s1", 1)}
    assert set(worker.ran_on.values()) == {"s1"}  # they moved
    assert [server.assigned for server in run.coordinator.status().servers] == [0]


async def test_cancelling_a_batch(run: ServiceRun, client: RolloutClient) -> None:
    worker = await run.worker()
    worker.may_run.clear()
    await run.server()
    await client.submit_batch(order())
    await until(lambda: len(worker.ran_on) == 8)
    assert (await client.cancel_batch("b")).state is BatchState.CANCELLED
    assert (await client.cancel_batch("b")).state is BatchState.CANCELLED
    result = await client.wait_batch("b")
    assert {r.status for group in result.groups for r in group.rollouts} == {Status.CANCELLED}
    await until(lambda: len(worker.discarded) == 8)
    await until(lambda: run.coordinator.status().workers[0].pools["run"][0] == 0)


async def test_a_finished_batch_cannot_be_cancelled(run: ServiceRun, client: RolloutClient) -> None:
    await run.worker()
    await run.server()
    await client.submit_batch(order())
    await client.wait_batch("b")
    with pytest.raises(ServiceError) as refused:
        await client.cancel_batch("b")
    assert (refused.value.status, refused.value.code) == (409, "already_finished")


async def test_single_rollouts_wait_and_cancel(run: ServiceRun, client: RolloutClient) -> None:
    specs = [RolloutSpec("a", "t", {}), RolloutSpec("b", "t", {})]
    worker = await run.worker()
    worker.may_run.clear()
    await run.server()
    progress = await client.submit_rollouts(specs)
    assert [p.rollout_id for p in progress] == ["a", "b"]
    assert (await client.cancel_rollout("b")).status is Status.CANCELLED
    worker.may_run.set()
    assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).reward == 0.0
    assert (await client.get_rollout("a")).status is Status.DONE
    assert (await client.submit_rollouts(specs))[0].status is Status.DONE
    for call in (client.get_rollout("none"), client.cancel_rollout("none"), client.batch_progress("none")):
        with pytest.raises(ServiceError) as refused:
            await call
        assert refused.value.status == 404
    with pytest.raises(ServiceError) as refused:
        await client.cancel_rollout("a")
    assert refused.value.status == 409


async def test_weights_reach_all_servers_and_the_late_one(run: ServiceRun, client: RolloutClient) -> None:
    servers = [await run.server("s0"), await run.server("s1")]
    update = WeightUpdate(1, ["/w/1.safetensors"])
    answers = await client.update_weights(update)
    assert [(a.server_id, a.version, a.error) for a in answers] == [("s0", 1, ""), ("s1", 1, "")]
    late = await run.server("s2")
    await until(lambda: late.got == [update])
    # What is known already is not loaded again.
    assert len(await client.update_weights(update)) == 3
    assert [len(server.got) for server in (*servers, late)] == [1, 1, 1]
    with pytest.raises(ServiceError) as refused:
        await client.update_weights(WeightUpdate(1, ["/other"]))
    assert (refused.value.status, refused.value.code) == (409, "stale_version")


async def test_no_run_starts_on_outdated_weights(run: ServiceRun, client: RolloutClient) -> None:
    await run.server("new")
    await client.update_weights(WeightUpdate(1, ["/w"]))
    late = await run.server("old", holds_loads=True)
    worker = await run.worker()
    await until(lambda: len(late.got) == 1)
    await client.submit_batch(order("b1"))
    await client.wait_batch("b1")
    assert set(worker.ran_on.values()) == {"new"}
    late.may_load.set()
    await until(lambda: {s.weight_version for s in run.coordinator.status().servers} == {1})
    worker.ran_on.clear()
    await client.submit_batch(order("b2"))
    await client.wait_batch("b2")
    assert set(worker.ran_on.values()) == {"new", "old"}


async def test_an_engine_that_lost_its_weights_gets_them_again(run: ServiceRun, client: RolloutClient) -> None:
    server = await run.server()
    await client.update_weights(WeightUpdate(1, ["/w"]))
    server.version = 0
    await until(lambda: len(server.got) == 2 and server.version == 1)


async def test_the_error_of_a_server_is_told(run: ServiceRun, client: RolloutClient) -> None:
    await run.server("good")
    bad = await run.server("bad", refuses="the probe differs by 3 nats")
    answers = {a.server_id: a.error for a in await client.update_weights(WeightUpdate(1, ["/w"]))}
    assert answers == {"good": "", "bad": "the probe differs by 3 nats"}
    bad.refuses = ""
    assert {a.error for a in await client.update_weights(WeightUpdate(1, ["/w"]))} == {""}


async def test_a_server_that_vanishes_while_it_loads_is_an_error(run: ServiceRun, client: RolloutClient) -> None:
    slow = await run.server(holds_loads=True)
    updating = asyncio.create_task(client.update_weights(WeightUpdate(1, ["/w"])))
    await until(lambda: bool(slow.got))
    await run.vanish("s0")
    answers = await asyncio.wait_for(updating, 10)
    assert "lost" in answers[0].error


async def test_weights_without_any_server(client: RolloutClient) -> None:
    with pytest.raises(ServiceError) as refused:
        await client.update_weights(WeightUpdate(1, ["/w"]))
    assert (refused.value.status, refused.value.code) == (503, "no_servers")


async def test_unhealthy_servers_get_nothing(run: ServiceRun, client: RolloutClient) -> None:
    await run.server("ill", healthy=False)
    await run.server("well")
    await until(lambda: {s.server_id: s.healthy for s in run.coordinator.status().servers}["ill"] is False)
    worker = await run.worker()
    await client.submit_batch(order())
    await client.wait_batch("b")
    assert set(worker.ran_on.values()) == {"well"}


async def test_the_status_file_and_the_status_agree(run: ServiceRun, client: RolloutClient) -> None:
    await run.worker(pools=Pools(1, 2, 3, 4))
    await run.server()
    await client.submit_batch(order())
    await client.wait_batch("b")
    status = await client.status()
    assert status.rollouts["done"] == 8
    assert status.workers[0].pools == {"init": [0, 1], "ready": [0, 2], "run": [0, 3], "eval": [0, 4]}
    assert [batch.state for batch in status.batches] == [BatchState.DONE]
    await until(lambda: msgspec.json.decode(run.status_file.read_bytes(), type=RunStatus).rollouts["done"] == 8)


async def test_the_end_tells_agents_and_waiting_clients(run: ServiceRun, client: RolloutClient) -> None:
    worker, server = await run.worker(), await run.server()
    worker.may_run.clear()
    await client.submit_batch(order())
    waiting = asyncio.create_task(client.wait_batch("b"))
    await until(lambda: len(worker.ran_on) == 8)
    run.stop.set()
    with pytest.raises(ServiceError) as refused:
        await asyncio.wait_for(waiting, 5)
    assert (refused.value.status, refused.value.code) == (503, "shutting_down")
    await asyncio.wait_for(worker.shut_down.wait(), 5)
    await asyncio.wait_for(server.shut_down.wait(), 5)


async def test_a_client_survives_a_lost_connection(run: ServiceRun, tmp_path: Path) -> None:
    """Every third connection is cut in the middle."""
    await run.worker()
    await run.server()
    count = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        request = await reader.read(65536)
        if count % 3 == 1:
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(run.socket_path))
        inner_writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        answer = await inner_reader.read()
        writer.write(answer if count % 3 == 2 else answer[: len(answer) // 2])
        await writer.drain()
        writer.close()
        inner_writer.close()

    path = tmp_path / "relay"
    async with await asyncio.start_unix_server(relay, str(path)), RolloutClient(str(path), patience_s=10) as client:
        await client.submit_batch(order())
        result = await asyncio.wait_for(client.wait_batch("b"), 20)
        assert result.progress.rollouts_done == 8
        assert isinstance(await client.batch_progress("b"), BatchProgress)
    assert count > 3


async def test_a_client_says_who_cannot_be_reached(tmp_path: Path) -> None:
    async with RolloutClient(str(tmp_path / "nobody"), patience_s=0.2) as client:
        with pytest.raises(ServiceError, match="nobody cannot be reached"):
            await client.status()


async def test_the_unix_socket_is_private(run: ServiceRun) -> None:
    assert stat.S_IMODE(run.socket_path.stat().st_mode) == 0o600


async def test_over_tcp_with_the_token(run: ServiceRun) -> None:
    await run.worker()
    await run.server()
    async with RolloutClient(run.face.url, run.keys.api_token) as client:
        await client.submit_batch(order())
        assert (await client.wait_batch("b")).progress.accepted == 2


async def test_the_metrics_count_what_happened(run: ServiceRun, client: RolloutClient) -> None:
    await run.worker()
    await run.server()
    await client.submit_batch(order())
    await client.wait_batch("b")
    said = dict(line.rsplit(" ", 1) for line in (await client.metrics()).splitlines() if not line.startswith("#"))
    assert float(said["prorl_rollouts_accepted_total"]) == 8
    assert float(said['prorl_rollouts_ended_total{kind="none",policy="policy",status="done"}']) == 8
    assert float(said['prorl_stage_busy_seconds_count{stage="eval"}']) == 8
    assert float(said["prorl_journal_commit_seconds_count"]) > 0
    assert float(said['prorl_worker_slots{pool="run",worker="w0"}']) == 16
