"""The LLM servers of engine.outside, registered when the coordinator starts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.rollout.outside_servers import OutsideServers, configured_servers, join_at_start
from prorl_hpc.service.errors import Refusal


def test_urls_become_servers() -> None:
    urls = ["http://node7:8000", "https://llm.example/api/v1/", "http://node8:8000/v1#smollm", "unix:/run/llm.sock"]
    assert configured_servers(urls, "key") == [
        OutsideServer("outside-0", "http://node7:8000/v1", api_key="key"),
        OutsideServer("outside-1", "https://llm.example/api/v1", api_key="key"),
        OutsideServer("outside-2", "http://node8:8000/v1", "smollm", api_key="key"),
        OutsideServer("outside-3", "unix:/run/llm.sock", api_key="key"),
    ]


def refusal(message: str, *, waits: bool) -> Refusal:
    return Refusal(message, code="server_unfit", status=422, details={"may_be_starting": waits})


@pytest.mark.parametrize("again", ["http://node7:8000/v1/", "http://node7:8000", "http://node7:8000/v1#other"])
def test_a_server_that_is_named_twice_is_refused(again: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.outside: http://node7:8000/v1 is named twice"):
        configured_servers(["http://node7:8000/v1", again])


async def test_those_that_do_not_answer_are_asked_again_and_then_named() -> None:
    asked: list[str] = []
    said: list[str] = []

    async def add(server: OutsideServer) -> None:
        asked.append(server.server_id)
        if server.server_id == "outside-2" or asked.count(server.server_id) < 2:
            raise refusal(f"{server.url} does not answer", waits=True)

    servers = configured_servers(["http://a/v1", "http://b/v1"])
    await join_at_start(servers, add, said.append)
    assert sorted(asked) == ["outside-0", "outside-0", "outside-1", "outside-1"]
    assert said[0] == "waiting for http://a/v1: http://a/v1 does not answer"
    servers = configured_servers(["http://a/v1", "http://b/v1", "http://c/v1"])
    with pytest.raises(RunError, match=r"^engine\.outside: http://c/v1 does not answer$"):
        await join_at_start(servers, add, said.append, limit_s=0.0)


async def test_a_final_refusal_ends_the_wait_for_all() -> None:
    ended: list[str] = []

    async def add(server: OutsideServer) -> None:
        if server.server_id == "outside-small-0":
            await asyncio.sleep(0)  # the other one is asked first
            raise refusal("it serves the models m: model x is not among them", waits=False)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(server.server_id)

    servers = configured_servers(["http://a/v1"]) + configured_servers(["http://b/v1"], policy="small")
    words = r"^policies\.small\.outside: it serves the models m: model x is not among them$"
    with pytest.raises(RunError, match=words):
        await join_at_start(servers, add, [].append)
    assert ended == ["outside-0"]


async def test_what_the_real_probe_says_is_final_or_not(tmp_path: Path) -> None:
    servers = OutsideServers(None, print, lambda policy: 0)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"^engine\.outside: LLM server outside-0 at .* does not answer"):
        await join_at_start(configured_servers([f"unix:{tmp_path}/no"]), servers.add, [].append, limit_s=0.0)
    said: list[str] = []
    async with a_server({"/v1/models": {"data": [{"id": "m"}]}}) as url:
        with pytest.raises(RunError, match="serves the models m: model x is not among them"):
            await join_at_start(configured_servers([f"{url}/v1#x"]), servers.add, said.append)
        with pytest.raises(RunError, match="answers 404 to /models"):
            await join_at_start(configured_servers([f"{url}/v2"]), servers.add, said.append)
    assert said == []


@asynccontextmanager
async def a_server(answers: dict[str, Any]) -> AsyncIterator[str]:
    app = web.Application()
    for route, answer in answers.items():
        app.router.add_get(route, functools.partial(_say, answer))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


async def _say(answer: Any, request: web.Request) -> web.Response:
    return web.json_response(answer)
