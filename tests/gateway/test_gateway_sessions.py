"""Branches, hang-ups, limits and faults: what becomes of a rollout at the gateway."""

from __future__ import annotations

import asyncio
import stat
from typing import Any

import aiohttp
import pytest
from gateway_site import WaitingLLM, gateway_site

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.trajectory import Finish

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALL = pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])


def ask(path: str, *texts: str, **fields: Any) -> dict[str, Any]:
    """``texts``: the user's and the assistant's in turn."""
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    common = {"model": "m", **fields}
    if path == RESPONSES:
        return {**common, "input": said}
    return {**common, "messages": said} | ({"max_tokens": 100} if path == ANTHROPIC else {})


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_socket_is_the_owners_alone(chat: ChatFormat) -> None:
    async with gateway_site(chat, []) as site:
        assert stat.S_IMODE(site.gateway.socket.stat().st_mode) == 0o600
        await site.gateway.close()
        assert not site.gateway.socket.exists()


async def test_parallel_calls_are_branches_that_share_the_prompt(chat: ChatFormat) -> None:
    llm = WaitingLLM(chat, ["a", "b", "c"])
    async with gateway_site(chat, llm) as site:
        asked = [asyncio.create_task(site.post(CHAT, ask(CHAT, "p"))) for _ in range(3)]
        await until(lambda: llm.waiting == 3)
        llm.go.set()
        await asyncio.gather(*asked)
        whole = site.trajectory
        parts = [whole, *whole.branches]
        assert sorted(text for part in parts for text in site.trained(part)) == ["a", "b", "c"]
        assert {tuple(part.segments[0].token_ids) for part in parts} == {tuple(whole.segments[0].token_ids)}
        llm.texts = ["d"]
        await site.post(CHAT, ask(CHAT, "p", site.trained(whole.branches[1])[0], "on"))
        assert site.trained(site.trajectory.branches[1])[1] == "d" and len(site.trajectory.branches) == 2


async def test_a_compacted_history_is_a_branch_of_its_own(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["one", "two", "three", "four"]) as site:
        await site.post(CHAT, ask(CHAT, "task"))
        await site.post(CHAT, ask(CHAT, "task", "one", "more"))
        await site.post(CHAT, ask(CHAT, "task, and in short what came of it"))
        await site.post(CHAT, ask(CHAT, "task", "one", "another way"))
        whole = site.trajectory
        assert site.trained(whole) == ["one", "two"]
        assert [site.trained(branch) for branch in whole.branches] == [["three"], ["four"]]
        assert "one" in site.text(whole.branches[1]), "what was before the fork is there, but not trained"
        assert site.session.last_text == "four"


@ALL
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_generation_and_can_ask_again(
    chat: ChatFormat, path: str, stream: bool
) -> None:
    llm = WaitingLLM(chat, ["x"])
    async with gateway_site(chat, llm, ping_s=0.05) as site:
        with pytest.raises(TimeoutError):
            async with site.http.post(
                path, json=ask(path, "p", stream=stream), timeout=aiohttp.ClientTimeout(total=0.3)
            ) as answer:
                await answer.read()
        await until(lambda: llm.cancelled == 1 and llm.waiting == 0)
        llm.go.set()
        status, _ = await site.post(path, ask(path, "p"))
        assert status == 200 and site.trained(site.trajectory) == ["x"] and site.trajectory.branches == []


@ALL
async def test_closing_the_session_cancels_what_runs(chat: ChatFormat, path: str) -> None:
    llm = WaitingLLM(chat, [])
    async with gateway_site(chat, llm) as site:
        asked = asyncio.create_task(site.post(path, ask(path, "p")))
        await until(lambda: llm.waiting)
        await site.session.close()
        assert llm.cancelled == 1 and site.session.over
        assert (await asked)[0] == 403
        assert (await site.post(path, ask(path, "p")))[0] == 401


@ALL
@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_server_ends_the_session(chat: ChatFormat, path: str, stream: bool) -> None:
    async with gateway_site(chat, [InferenceError("it burns")]) as site:
        if stream:
            events = await site.stream(path, ask(path, "p"))
            assert "it burns" in str(events[-1][1]["error"]["message"])
        else:
            async with site.http.post(path, json=ask(path, "p")) as answer:
                assert answer.status == 500 and answer.headers["x-should-retry"] == "false"
        await asyncio.wait_for(site.session.wait_over(), 1)
        assert str(site.session.failure) == "it burns"
        assert (await site.post(path, ask(path, "p")))[0] == 403


@ALL
async def test_a_call_that_is_too_long_changes_nothing(chat: ChatFormat, path: str) -> None:
    async with gateway_site(chat, ["one", "two", "three"], max_context_tokens=60) as site:
        await site.post(path, ask(path, "p"))
        for _ in range(2):
            status, body = await site.post(path, ask(path, "p", "one", "long " * 50))
            assert status == 400 and "maximum context length is 60 tokens" in body["error"]["message"]
        assert site.trajectory.finish is Finish.UNKNOWN and site.context.branches == []
        # From the answer that it has, or all anew.
        assert (await site.post(path, ask(path, "p", "one", "q")))[0] == 200
        assert (await site.post(path, ask(path, "in short")))[0] == 200
        assert site.trained(site.trajectory) == ["one", "two"] and "long" not in site.text(site.trajectory)
        assert [site.trained(branch) for branch in site.trajectory.branches] == [["three"]]
        assert (await site.post(path, ask(path, "p", "one", "long " * 50)))[0] == 400
        assert (await site.post(path, ask(path, "in short", "three", "long " * 50)))[0] == 400
        assert len(site.context.branches) == 1, "the fork that was too long is not kept"
        await site.session.close()
        ends = [site.trajectory.finish, *(branch.finish for branch in site.trajectory.branches)]
        assert ends == [Finish.ENVIRONMENT, Finish.CONTEXT], "only what could not go on, and has not"


async def test_the_token_budget_is_that_of_all_conversations(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["one two three"] * 3, max_rollout_tokens=6) as site:
        _, first = await site.post(CHAT, ask(CHAT, "p"))
        assert first["choices"][0]["finish_reason"] == "length"
        status, body = await site.post(CHAT, ask(CHAT, "q"))
        assert status == 403 and "task.max_rollout_tokens" in body["error"]["message"] and site.session.over


async def test_prefill_of_generated_turns_and_foreign_answers(chat: ChatFormat) -> None:
    """An example dialogue that nobody generated is only read."""
    async with gateway_site(chat, ["x"]) as site:
        status, _ = await site.post(CHAT, ask(CHAT, "q", "an example", "p"))
        assert status == 200 and site.trained(site.trajectory) == ["x"]
        assert "an example" in site.text(site.trajectory)


@ALL
async def test_malformed_calls_are_seen_as_text(chat: ChatFormat, path: str) -> None:
    async with gateway_site(chat, ["<think>hm</think>so <call>{</call>"]) as site:
        tool = {"name": "f", "parameters": {}, "input_schema": {"type": "object"}, "function": {"name": "f"}}
        tools = [tool if path == ANTHROPIC else {"type": "function", **tool}]
        _, body = await site.post(path, ask(path, "p", tools=tools))
        assert "so <call>{</call>" in str(body) and "tool_use" not in str(body)


async def test_calls_that_the_client_does_not_want_are_text(chat: ChatFormat) -> None:
    turn = '<call>{"name": "f", "arguments": {}}</call>'
    async with gateway_site(chat, [turn]) as site:
        _, body = await site.post(CHAT, ask(CHAT, "p", tool_choice="none"))
        assert body["choices"][0]["message"]["content"] == turn


@pytest.mark.parametrize("body", ["{", "[1]", "null", "\xff"])
@ALL
async def test_what_is_no_json_object_is_refused(chat: ChatFormat, path: str, body: str) -> None:
    async with gateway_site(chat, []) as site, site.http.post(path, data=body) as answer:
        assert answer.status == 400 and "JSON" in (await answer.json())["error"]["message"]


async def test_models_and_unknown_paths(chat: ChatFormat) -> None:
    async with gateway_site(chat, []) as site:
        async with site.http.get("/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]
        async with site.http.get("/v1/models/gpt-x", headers={"anthropic-version": "2023-06-01"}) as answer:
            assert (await answer.json())["type"] == "model"
        async with site.http.get("/v1/models", headers={"Authorization": "Bearer no"}) as answer:
            assert answer.status == 401
        async with site.http.post("/v1/embeddings", json={}) as answer:
            assert answer.status == 404 and "/v1/responses" in (await answer.json())["error"]["message"]
        async with site.http.get(CHAT) as answer:
            assert answer.status == 405


async def test_a_stream_that_waits_shows_that_it_lives(chat: ChatFormat) -> None:
    llm = WaitingLLM(chat, ["x"])
    async with (
        gateway_site(chat, llm, ping_s=0.02) as site,
        site.http.post(CHAT, json=ask(CHAT, "p", stream=True)) as answer,
    ):
        assert await answer.content.readline() == b": working\n"
        llm.go.set()
        assert (await answer.text()).endswith("data: [DONE]\n\n")
