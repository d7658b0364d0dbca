"""The search that a worker does for its rollouts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from prorl_hpc.worker.web_search import make_web_search, results_text


async def answer(request: web.Request) -> web.Response:
    query = request.query["q"]
    if query == "down":
        raise web.HTTPServiceUnavailable
    if query == "page":
        return web.Response(text="<html>")
    if query == "flood":
        return web.Response(body=b" " * (5 << 20))
    found = {"title": f"About {query}", "url": "http://a", "content": "x" * 900}
    return web.json_response({"results": [found] * (0 if query == "none" else 20)})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/search", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server: Any = site._server
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/search?q={{query}}"
    await runner.cleanup()


async def test_results_come_as_short_text(url: str) -> None:
    search = make_web_search(url)
    assert search is not None
    text = await search("a&q=b c/é", 10)
    assert text.startswith("About a&q=b c/é\nhttp://a\nxxx")
    assert len(text) < 5000
    assert await search("none", 10) == ""


@pytest.mark.parametrize(("query", "said"), [("down", "HTTP 503"), ("page", "than JSON"), ("flood", "more than 4 MiB")])
async def test_what_is_no_answer_is_an_error(url: str, query: str, said: str) -> None:
    search = make_web_search(url)
    assert search is not None
    with pytest.raises(OSError, match=said):
        await search(query, 10)


async def test_nobody_there_is_an_error() -> None:
    search = make_web_search("http://127.0.0.1:9/?q={query}")
    assert search is not None
    with pytest.raises(OSError, match="127"):
        await search("x", 10)


def test_without_a_url_there_is_none() -> None:
    assert make_web_search("") is None


@pytest.mark.parametrize("body", [{}, [], {"results": "x"}])
def test_other_json_is_refused(body: object) -> None:
    with pytest.raises(OSError, match="without a list"):
        results_text(json.dumps(body).encode())
