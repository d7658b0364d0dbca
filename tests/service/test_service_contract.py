"""What every RolloutService promises, asked through the client: of the fake one as of the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_run import fake_run
from service_run import service_run

from prorl_hpc.messages.batch import BatchSpec, BatchState, GroupOutcome
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import OutsideServer, WeightSource, WeightUpdate
from prorl_hpc.messages.rollout import NumberedResult, RolloutSpec, Status
from prorl_hpc.service.client import RolloutClient


@dataclass
class Place:
    """A service with one worker and one LLM server. ``hold``: rollouts stay in RUN until ``release``."""

    client: RolloutClient
    socket_path: Path
    hold: Callable[[], None]
    release: Callable[[], None]


@pytest.fixture(params=["fake", "coordinator"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "fake":
        async with fake_run(tmp_path) as fake, fake.client(patience_s=0) as client:
            yield Place(client, fake.socket_path, fake.service.hold, fake.service.release)
        return
    async with service_run(tmp_path) as run, run.client(patience_s=0) as client:
        worker = await run.worker()
        await run.server()
        yield Place(client, run.socket_path, worker.may_run.clear, worker.may_run.set)


def order(batch_id: str = "b", **changes: Any) -> BatchSpec:
    rows = [{"id": f"r{i}"} for i in range(4)]
    values: dict[str, Any] = {"task": "t", "rows": rows, "groups_wanted": 2, "group_size": 2}
    return BatchSpec(batch_id, **(values | changes))


def single(rollout_id: str, **changes: Any) -> RolloutSpec:
    return RolloutSpec(rollout_id, "t", {"id": "x"}, **changes)


async def refusal(call: Any) -> tuple[int, str]:
    with pytest.raises(ServiceError) as refused:
        await call
    return refused.value.status, refused.value.code


async def until_running(client: RolloutClient, rollout_id: str) -> None:
    async with asyncio.timeout(10):
        while rollout_id not in [r.rollout_id for r in await client.list_rollouts(status=Status.RUN)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_batch_is_carried_out(place: Place) -> None:
    await place.client.submit_batch(order())
    result = await place.client.wait_batch("b")
    assert result.progress.state is BatchState.DONE
    assert [group.outcome for group in result.groups] == [GroupOutcome.ACCEPTED] * 2
    assert result.groups[0].rollouts[1].trajectory.token_ids == [1, 2, 3]
    progress = await place.client.get_rollout("b.g0.s1")
    assert (progress.status, progress.batch_id) == (Status.DONE, "b")


async def test_the_same_again_is_the_same(place: Place) -> None:
    await place.client.submit_batch(order())
    first = await place.client.wait_batch("b")
    assert await place.client.submit_batch(order()) == first.progress
    assert await place.client.wait_batch("b") == first
    await place.client.submit_rollouts([single("a")])
    once = await place.client.wait_rollout("a")
    await place.client.submit_rollouts([single("a")])
    assert await place.client.wait_rollout("a") == once


async def test_others_under_the_same_id_are_refused(place: Place) -> None:
    await place.client.submit_batch(order())
    assert await refusal(place.client.submit_batch(order(group_size=3))) == (409, "batch_differs")
    await place.client.submit_rollouts([single("a")])
    assert (await refusal(place.client.submit_rollouts([single("new"), single("a", priority=1)])))[0] == 409
    assert (await refusal(place.client.get_rollout("new")))[0] == 404  # nothing half accepted


async def test_cancelling(place: Place) -> None:
    place.hold()
    await place.client.submit_batch(order())
    await place.client.submit_rollouts([single("a")])
    await until_running(place.client, "a")
    await place.client.cancel_rollout("a")
    assert (await place.client.wait_rollout("a")).status is Status.CANCELLED
    assert (await place.client.cancel_rollout("a")).status is Status.CANCELLED
    await place.client.cancel_batch("b")
    result = await place.client.wait_batch("b")
    assert result.progress.state is BatchState.CANCELLED
    assert (await place.client.cancel_batch("b")).state is BatchState.CANCELLED


async def test_what_is_over_cannot_be_cancelled(place: Place) -> None:
    await place.client.submit_batch(order())
    await place.client.wait_batch("b")
    await place.client.submit_rollouts([single("a")])
    await place.client.wait_rollout("a")
    assert await refusal(place.client.cancel_batch("b")) == (409, "already_finished")
    assert await refusal(place.client.cancel_rollout("a")) == (409, "already_finished")


async def test_what_is_unknown_is_404(place: Place) -> None:
    client = place.client
    for call in (
        client.get_rollout("no"), client.wait_rollout("no"), client.cancel_rollout("no"), client.batch_progress("no"),
        client.wait_batch("no"), client.cancel_batch("no"), client.list_batches(after="no"),
        client.list_rollouts(after="no"), client.drain_worker("no"), client.drain_server("no"), client.remove_server("no"),
    ):  # fmt: skip
        assert (await refusal(call))[0] == 404


async def test_lists_in_pages(place: Place) -> None:
    place.hold()
    for i in range(3):
        await place.client.submit_batch(order(f"b{i}"))
    assert [b.batch_id for b in await place.client.list_batches(limit=2)] == ["b0", "b1"]
    assert [b.batch_id for b in await place.client.list_batches(after="b1")] == ["b2"]
    of_one = await place.client.list_rollouts(batch_id="b1")
    assert {r.rollout_id for r in of_one} == {f"b1.g{g}.s{s}" for g in range(2) for s in range(2)}
    page = await place.client.list_rollouts(limit=5)
    rest = await place.client.list_rollouts(after=page[-1].rollout_id)
    assert len({r.rollout_id for r in page + rest}) == 12


async def test_those_under_way_are_listed_first(place: Place) -> None:
    await place.client.submit_rollouts([single("first"), single("second")])
    for rollout_id in ("first", "second"):
        await place.client.wait_rollout(rollout_id)
    place.hold()
    await place.client.submit_rollouts([single("third")])
    await until_running(place.client, "third")
    listed = await place.client.list_rollouts()
    assert listed[0].rollout_id == "third"
    assert {r.rollout_id for r in listed[1:]} == {"first", "second"}
    done = await place.client.list_rollouts(status=Status.DONE)
    assert {r.rollout_id for r in done} == {"first", "second"}
    assert [r.rollout_id for r in await place.client.list_rollouts(after=listed[1].rollout_id)] == [
        listed[2].rollout_id
    ]


async def read(client: RolloutClient, **more: Any) -> list[NumberedResult]:
    return [numbered async for numbered in client.stream(follow=False, **more)]


async def test_the_stream_has_every_result_once(place: Place) -> None:
    await place.client.submit_batch(order())
    await place.client.wait_batch("b")
    await place.client.submit_rollouts([single("a")])
    await place.client.wait_rollout("a")
    everything = await read(place.client)
    assert [n.result.rollout_id for n in everything if n.result.rollout_id == "a"] == ["a"]
    assert len({n.result.rollout_id for n in everything}) == len(everything) == 5
    cursors = [n.cursor for n in everything]
    assert cursors == sorted(set(cursors))
    assert await read(place.client, cursor=cursors[1]) == everything[2:]
    assert {n.result.rollout_id for n in await read(place.client, batch_id="b")} == {
        f"b.g{g}.s{s}" for g in range(2) for s in range(2)
    }
    assert everything[0].result.trajectory.token_ids == [1, 2, 3]


async def test_the_stream_goes_on_with_what_comes(place: Place) -> None:
    stream = place.client.stream()
    coming = asyncio.ensure_future(anext(stream))
    await place.client.submit_rollouts([single("a")])
    assert (await asyncio.wait_for(coming, 10)).result.rollout_id == "a"
    await stream.aclose()


async def test_pausing(place: Place) -> None:
    assert (await place.client.pause()).paused
    await place.client.submit_rollouts([single("a")])
    assert (await place.client.get_rollout("a")).status is Status.QUEUED
    assert not (await place.client.resume()).paused
    assert (await place.client.wait_rollout("a")).status is Status.DONE


async def test_a_pause_for_a_while_is_its_holders_and_ends_by_itself(place: Place) -> None:
    client = place.client
    held = await client.pause("trainer", 60.0)
    assert 50 < held.holds["trainer"] <= 60 and not held.paused
    await client.submit_rollouts([single("a")])
    assert (await client.pause()).paused
    freed = await client.resume("trainer")
    assert freed.paused and not freed.holds, "the lasting one stays"
    assert list((await client.pause("a", 30.0)).holds) == ["a"]
    both = await client.resume()
    assert not both.paused and list(both.holds) == ["a"], "the holder's stays"
    assert (await client.get_rollout("a")).status is Status.QUEUED
    await client.pause("a", 0.3)
    assert (await asyncio.wait_for(client.wait_rollout("a"), 10)).status is Status.DONE
    assert not (await client.status()).holds


async def test_a_pause_for_a_while_says_whose_and_how_long(place: Place) -> None:
    for holder, for_s in (("trainer", 0.0), ("", 5.0), ("trainer", 1e5)):
        with pytest.raises(ServiceError) as refused:
            await place.client.pause(holder, for_s)
        assert (refused.value.status, refused.value.code) == (400, "invalid_request")


async def test_draining_workers_and_servers(place: Place) -> None:
    assert (await place.client.drain_worker("w0")).draining
    assert [w.draining for w in await place.client.workers()] == [True]
    assert not (await place.client.drain_worker("w0", False)).draining
    assert (await place.client.drain_server("s0")).draining
    assert not (await place.client.drain_server("s0", False)).draining
    assert (await refusal(place.client.remove_server("s0")))[0] == 409


async def test_weights(place: Place) -> None:
    answers = await place.client.update_weights(WeightUpdate(2, ["/w"]))
    assert [(a.server_id, a.version, a.error) for a in answers] == [("s0", 2, "")]
    assert (await refusal(place.client.update_weights(WeightUpdate(1, ["/w"])))) == (409, "stale_version")
    assert [(p.policy, p.newest_version) for p in await place.client.policies()] == [("policy", 2)]
    streamed = WeightSource("10.0.0.1", 40_000, "word")
    for wrong in (WeightUpdate(3, []), WeightUpdate(3, ["/w"], source=streamed)):
        assert (await refusal(place.client.update_weights(wrong)))[0] == 400
    answers = await place.client.update_weights(WeightUpdate(3, [], source=streamed))
    assert [(a.server_id, a.version, a.error) for a in answers] == [("s0", 3, "")]


async def test_policies_that_the_run_does_not_have_are_refused(place: Place) -> None:
    client = place.client
    for call in (
        client.submit_batch(order(policy="nobody")), client.submit_rollouts([single("a", policy="nobody")]),
        client.update_weights(WeightUpdate(1, ["/w"], policy="any")),
        client.add_server(OutsideServer("o", "http://127.0.0.1:9/v1", policy="nobody")),
    ):  # fmt: skip
        assert await refusal(call) == (400, "unknown_policy")
    for call in (client.list_rollouts(policy="nobody"), anext(client.stream(follow=False, policy="any"))):
        assert await refusal(call) == (404, "unknown_policy")
    with pytest.raises(
        ServiceError, match=r"no policy 'polcy'; it has: policy.*; any for one by rollout\.policy_weights"
    ):
        await client.submit_batch(order(policy="polcy"))


async def test_lists_and_streams_of_one_policy(place: Place) -> None:
    await place.client.submit_rollouts([single("a"), single("b")])
    for rollout_id in ("a", "b"):
        assert (await place.client.wait_rollout(rollout_id)).policy == "policy"
    listed = await place.client.list_rollouts(policy="policy")
    assert {(p.rollout_id, p.policy) for p in listed} == {("a", "policy"), ("b", "policy")}
    assert len(await read(place.client, policy="policy")) == 2


async def test_metrics(place: Place) -> None:
    await place.client.submit_rollouts([single("a")])
    await place.client.wait_rollout("a")
    text = await place.client.metrics()
    assert "prorl_rollouts_accepted_total 1.0" in text
    assert 'prorl_rollouts_ended_total{kind="none",policy="policy",status="done"} 1.0' in text


async def test_a_job_of_prorl_agent(place: Place) -> None:
    unix = aiohttp.UnixConnector(str(place.socket_path))
    async with aiohttp.ClientSession("http://localhost", connector=unix) as session:

        async def ask(path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
            async with session.post(path, json=body) as response:
                return response.status, await response.json()

        job = {"instance": {"data_source": "t", "instance_id": "i", "id": "x"}, "job_id": "a/b"}
        assert (await ask("/start"))[0] == 200
        code, result = await ask("/process", job)
        assert (code, result["instance_id"], result["success"], result["filter"]) == (200, "i", True, False)
        assert await ask("/process", job) == (200, result)
        place.hold()
        other = asyncio.create_task(ask("/process", job | {"job_id": "c"}))
        await until_running(place.client, "job-c")
        assert (await ask("/stop"))[0] == 200
        code, result = await other
        assert (code, result["error"], result["filter"]) == (200, "cancelled", True)
