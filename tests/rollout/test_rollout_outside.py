"""The LLM servers of engine.outside, registered when the coordinator starts."""

from __future__ import annotations

import pytest

from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.rollout.outside_servers import configured_servers, join_at_start
from prorl_hpc.service.errors import Refusal


def test_urls_become_servers() -> None:
    urls = ["http://node7:8000", "https://llm.example/api/v1/", "http://node8:8000/v1#smollm", "unix:/run/llm.sock"]
    assert configured_servers(urls, "key") == [
        OutsideServer("outside-0", "http://node7:8000/v1", api_key="key"),
        OutsideServer("outside-1", "https://llm.example/api/v1", api_key="key"),
        OutsideServer("outside-2", "http://node8:8000/v1", "smollm", api_key="key"),
        OutsideServer("outside-3", "unix:/run/llm.sock", api_key="key"),
    ]


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
            raise Refusal(f"{server.url} does not answer", code="server_unfit", status=422)

    servers = configured_servers(["http://a/v1", "http://b/v1"])
    await join_at_start(servers, add, said.append)
    assert sorted(asked) == ["outside-0", "outside-0", "outside-1", "outside-1"]
    assert said[0] == "waiting for http://a/v1: http://a/v1 does not answer"
    servers = configured_servers(["http://a/v1", "http://b/v1", "http://c/v1"])
    with pytest.raises(RunError, match=r"^engine\.outside: http://c/v1 does not answer$"):
        await join_at_start(servers, add, said.append, limit_s=0.0)
