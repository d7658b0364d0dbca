"""The parts of the coordinator by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.messages.batch import BatchSpec
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    Draining,
    Goodbye,
    InferenceHello,
    Pools,
    ServerLoad,
    ServerRef,
    WorkerHello,
)
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status
from prorl_hpc.rollout.agents import Agents
from prorl_hpc.rollout.coordinator import Coordinator
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.rollout.weights import WeightFanOut
from prorl_hpc.service.server import HttpFace
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys


def hello(server_id: str = "s", version: int = 0) -> InferenceHello:
    return InferenceHello(ServerRef(server_id, "n", "ipc://x", ""), "fake", "m", version, 100)


def load(tokens: int, version: int = 0) -> ServerLoad:
    return ServerLoad("s", version, 0, 0, 0, tokens, True)


# weights


class FanOut(WeightFanOut):
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        super().__init__(lambda server, update: self.sent.append((server, update.version)), first_server_s=5)


def loaded(version: int, server_id: str, error: str = "") -> WeightUpdated:
    return WeightUpdated(version, server_id, 1.0, error=error)


async def test_a_publication_before_any_server_waits_for_the_first() -> None:
    fan_out = FanOut()
    publishing = asyncio.create_task(fan_out.publish(WeightUpdate(4, ["/w"])))
    await asyncio.sleep(0)
    fan_out.server_seen("s", 0, joined=True)
    assert fan_out.sent == [("s", 4)]
    fan_out.answered(loaded(4, "s"))
    assert await publishing == [loaded(4, "s")]


async def test_a_server_at_work_is_not_asked_twice() -> None:
    """Its heartbeats, and the Hello of one that hears nothing for long, still say the old version."""
    fan_out = FanOut()
    fan_out.server_seen("s", 0, joined=True)
    publishing = asyncio.create_task(fan_out.publish(WeightUpdate(1, ["/w"])))
    await asyncio.sleep(0)
    for _ in range(3):
        fan_out.server_seen("s", 0, joined=False)
    again = asyncio.create_task(fan_out.publish(WeightUpdate(1, ["/w"])))  # a client that lost its connection
    await asyncio.sleep(0)
    fan_out.answered(loaded(1, "s"))
    assert await publishing == await again == [loaded(1, "s")]
    assert fan_out.sent == [("s", 1)]


async def test_a_failed_server_is_not_asked_again_until_it_restarts_or_the_client_asks() -> None:
    fan_out = FanOut()
    fan_out.server_seen("s", 1, joined=True)
    publishing = asyncio.create_task(fan_out.publish(WeightUpdate(2, ["/w"])))
    await asyncio.sleep(0)
    fan_out.answered(loaded(2, "s", "no space"))
    assert (await publishing)[0].error == "no space"
    fan_out.server_seen("s", 1, joined=False)
    assert len(fan_out.sent) == 1
    fan_out.server_seen("s", 0, joined=False)
    assert len(fan_out.sent) == 2


async def test_a_newer_publication_supersedes() -> None:
    fan_out = FanOut()
    fan_out.server_seen("s", 0, joined=True)
    older = asyncio.create_task(fan_out.publish(WeightUpdate(1, ["/w1"])))
    await asyncio.sleep(0)
    newer = asyncio.create_task(fan_out.publish(WeightUpdate(2, ["/w2"])))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as refused:
        await older
    assert refused.value.code == "superseded"
    fan_out.answered(loaded(1, "s"))
    fan_out.answered(loaded(2, "s"))
    assert await newer == [loaded(2, "s")]
    with pytest.raises(ServiceError) as refused:
        await fan_out.publish(WeightUpdate(1, ["/w1"]))
    assert refused.value.code == "stale_version"


# agents


def test_tokens_per_second_survive_an_engine_that_starts_anew() -> None:
    agents = Agents()
    agent = agents.server_hello(hello(), b"p", 100.0)
    agent.reported(load(1000), 100.0)
    agent.reported(load(2000), 110.0)
    assert agent.tokens_per_s == 100.0
    agent.reported(load(0), 111.0)
    agent.reported(load(500), 121.0)
    assert agent.tokens_per_s == 50.0
    assert agents.server_hello(hello(), b"p", 122.0) is agent


def test_silence() -> None:
    agents = Agents()
    agents.server_hello(hello("s"), b"s", 0.0)
    agents.server_hello(hello("t"), b"t", 0.0)
    agents.heard(b"t", 8.0)
    agents.heard(b"stranger", 8.0)
    assert agents.silent(11.0, 10.0) == [("s", 11.0)]
    agents.forgive(11.0)
    assert agents.silent(11.0, 10.0) == []
    agents.forget("s")
    assert agents.silent(99.0, 10.0) == [("t", 88.0)]


# coordinator


@asynccontextmanager
async def coordinator(directory: Path) -> AsyncIterator[tuple[Coordinator, Journal]]:
    """One that two agents have joined, without its tasks."""
    keys = RunKeys.create(directory / "keys")
    door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, directory / "c.zmq")
    journal = await Journal.open(directory / "journal.sqlite", epoch="e", store=None)
    made = Coordinator(
        "run",
        RolloutConfig(),
        door,
        journal,
        Keepsakes(directory / "keepsakes.json", "e"),
        status_file=directory / "status.json",
        drained_marker=directory / "DRAINED",
        tasks=["t"],
    )
    try:
        yield made, journal
    finally:
        door.close()
        await journal.close()


def join(coordinator: Coordinator) -> None:
    coordinator.take(b"w", WorkerHello("w", "n", Pools(), "fake"))
    coordinator.take(b"s", hello())


async def test_a_journal_that_cannot_write_ends_the_coordinator(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (made, journal):
        running = asyncio.create_task(made.run(asyncio.Event()))
        await asyncio.sleep(0)
        journal.failed.set_result(RunError("the disk is full"))
        with pytest.raises(ExceptionGroup) as broken:
            await asyncio.wait_for(running, 10)
        assert "the disk is full" in str(broken.value.exceptions[0])


async def test_too_many_rollouts_are_refused_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.rollout.admission.MAX_LIVE_ROLLOUTS", 5)
    async with coordinator(tmp_path) as (made, _):
        join(made)
        await made.submit_batch(BatchSpec("b", "t", [{}], 1, 4))
        await made.submit_batch(BatchSpec("b", "t", [{}], 1, 4))
        with pytest.raises(ServiceError) as refused:
            await made.submit_batch(BatchSpec("c", "t", [{}], 1, 2))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with pytest.raises(ServiceError):
            await made.batch_progress("c")


async def test_without_anybody_to_do_it_an_order_is_refused_unless_it_is_known(tmp_path: Path) -> None:
    rollouts = [RolloutSpec("a", "t", {})]
    async with coordinator(tmp_path) as (made, _):
        for submit in (made.submit_rollouts(rollouts), made.submit_batch(BatchSpec("b", "t", [{}], 1, 2))):
            with pytest.raises(ServiceError) as refused:
                await submit
            assert (refused.value.status, refused.value.code) == (503, "no_workers")
        made.take(b"w", WorkerHello("w", "n", Pools(), "fake"))
        with pytest.raises(ServiceError) as refused:
            await made.submit_rollouts(rollouts)
        assert (refused.value.status, refused.value.code) == (503, "no_servers")
        made.take(b"s", hello())
        await made.submit_rollouts(rollouts)
        made.take(b"w", Goodbye("w"))
        assert [p.status for p in await made.submit_rollouts(rollouts)] == [Status.QUEUED]
        with pytest.raises(ServiceError, match="other contents"):
            await made.submit_rollouts([RolloutSpec("a", "t", {"other": 1})])


async def test_who_leaves_in_order_alarms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with coordinator(tmp_path) as (made, _):
        join(made)
        made.take(b"w", Goodbye("w"))
    (record,) = [record for record in caplog.records if "w has left" in record.getMessage()]
    assert record.levelname == "INFO"
    assert not [record for record in caplog.records if "is lost" in record.getMessage()]


async def test_a_worker_that_drained_and_is_started_anew_takes_rollouts_again(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (made, _):
        join(made)
        made.take(b"w", Draining("w"))
        assert made.status().workers[0].draining
        made.take(b"w", WorkerHello("w", "n", Pools(), "fake"))
        assert not made.status().workers[0].draining
        await made.drain_worker("w", True)
        made.take(b"w", WorkerHello("w", "n", Pools(), "fake"))
        assert made.status().workers[0].draining  # what a person ordered holds


async def test_rollouts_that_ended_before_a_restart_are_counted(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (made, journal):
        await journal.record(RolloutResult("a", "", 0, "t", Status.DONE, 1.0), None, "")
        await journal.record(RolloutResult("b", "", 0, "t", Status.CANCELLED), None, "")
        await made.resume()
        counts = made.status().rollouts
        assert (counts["done"], counts["cancelled"], counts["failed"]) == (1, 1, 0)


async def test_a_client_of_a_service_that_fails_is_told_to_ask_again(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (made, journal):
        join(made)

        async def broken(specs: list[RolloutSpec]) -> list[bool]:
            raise RunError("the disk is full")

        journal.accept_rollouts = broken  # type: ignore[method-assign]
        async with (
            aiohttp.ClientSession() as session,
            HttpFace(made, tmp_path / "c.http", tcp_host="127.0.0.1", token="t") as face,
        ):
            order = {"json": [{"rollout_id": "a", "task": "t", "row": {}}], "headers": {"Authorization": "Bearer t"}}
            async with session.post(f"{face.url}/v1/rollouts", **order) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
                assert (await answer.json())["error"]["code"] == "failing"
