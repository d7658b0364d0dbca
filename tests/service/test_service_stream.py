"""The stream of results: pages, cursors, readers that are slow or go away, and the client that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from fake_run import FakeRun, fake_run
from fake_service import TRAJECTORY

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.rollout import NumberedResult, RolloutSpec
from prorl_hpc.messages.trajectory import Segment, Trajectory
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.service.result_stream import PAGE


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FakeRun]:
    async with fake_run(tmp_path, keep_alive_s=0.05) as made:
        yield made


@pytest.fixture
async def session(run: FakeRun) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(run.socket_path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as made:
        yield made


async def end(run: FakeRun, first: int, count: int) -> None:
    await run.service.submit_rollouts([RolloutSpec(f"r{i}", "t", {}) for i in range(first, first + count)])


async def lines(session: aiohttp.ClientSession, query: str) -> list[NumberedResult]:
    async with session.get(f"/v1/results?{query}") as response:
        assert (response.status, response.content_type) == (200, "application/x-ndjson")
        body = await response.read()
    return [msgspec.json.decode(line, type=NumberedResult) for line in body.splitlines() if line]


async def test_more_than_a_page(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await end(run, 0, 2 * PAGE + 1)
    assert [n.cursor for n in await lines(session, "")] == list(range(1, 2 * PAGE + 2))
    assert [n.cursor for n in await lines(session, f"cursor=3&limit={PAGE + 1}")] == list(range(4, PAGE + 5))


async def test_trajectories_may_be_left_out(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await end(run, 0, 1)
    (short,) = await lines(session, "trajectories=false")
    (whole,) = await lines(session, "")
    assert (short.result.trajectory, short.result.reward) == (Trajectory(), 0.0)
    assert whole.result.trajectory == TRAJECTORY


async def test_following_says_that_it_is_there(run: FakeRun, session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/results?follow=true") as response:
        assert [await response.content.readline() for _ in range(3)] == [b"\n"] * 3
        await end(run, 0, 1)
        line = b"\n"
        while line == b"\n":
            line = await response.content.readline()
        assert msgspec.json.decode(line, type=NumberedResult).cursor == 1


async def test_following_ends_at_its_limit(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await end(run, 0, 2)
    assert len(await lines(session, "follow=true&limit=2")) == 2


async def test_an_end_in_the_midst_is_the_last_line(run: FakeRun, session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/results?follow=true") as response:
        await response.content.readline()
        await run.service.close()
        last = (await response.read()).splitlines()[-1]
        assert msgspec.json.decode(last)["error"]["code"] == "shutting_down"


async def test_a_slow_reader_has_one_page_read_for_it(run: FakeRun) -> None:
    """What the service reads ahead of a reader that does not read is what the sockets hold, and a page."""
    run.service.trajectory = Trajectory([Segment(list(range(20_000)))])
    await end(run, 0, 300)
    asked: list[int] = []
    results = run.service.results

    async def counted(cursor: int, limit: int, wait_s: float, batch_id: str) -> list[NumberedResult]:
        asked.append(limit)
        return await results(cursor, limit, wait_s, batch_id)

    run.service.results = counted  # type: ignore[method-assign]
    reader, writer = await asyncio.open_unix_connection(str(run.socket_path), limit=1024)
    writer.write(b"GET /v1/results HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.read(1)
    async with run.client() as other:
        for _ in range(20):
            await other.status()  # others are served meanwhile
    assert sum(asked) < 150
    writer.close()


async def test_readers_that_went_away_are_let_go(run: FakeRun, session: aiohttp.ClientSession) -> None:
    for _ in range(5):
        async with session.get("/v1/results?follow=true") as response:
            await response.content.readline()
    async with asyncio.timeout(10):
        while len(run.service.waiting) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_client_reads_long_lines(run: FakeRun) -> None:
    run.service.trajectory = Trajectory([Segment(list(range(100_000)))])
    await end(run, 0, 2)
    async with run.client() as client:
        found = [n.result.trajectory.num_tokens async for n in client.stream(follow=False)]
    assert found == [100_000, 100_000]


async def test_the_client_goes_on_behind_the_last_result(run: FakeRun, tmp_path: Path) -> None:
    """Each connection is cut after some bytes, in the midst of a line."""
    await end(run, 0, 20)
    connections = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(run.socket_path))
        inner_writer.write(await reader.read(65536))
        left = 4000
        while left > 0 and (chunk := await inner_reader.read(left)):
            writer.write(chunk)
            left -= len(chunk)
        await writer.drain()
        writer.close()
        inner_writer.close()

    path = tmp_path / "relay"
    async with await asyncio.start_unix_server(relay, str(path)), RolloutClient(str(path), patience_s=10) as client:
        got = []
        async for numbered in client.stream():
            got.append(numbered.cursor)
            if len(got) == 20:
                break
    assert got == list(range(1, 21))
    assert connections > 1


async def test_the_client_tells_of_the_end(run: FakeRun) -> None:
    async with run.client(patience_s=5) as client:
        stream = client.stream()
        waiting = asyncio.ensure_future(anext(stream))
        async with asyncio.timeout(10):
            while not run.service.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await run.service.close()
        with pytest.raises(ServiceError) as refused:
            await asyncio.wait_for(waiting, 10)
    assert refused.value.code == "shutting_down"
