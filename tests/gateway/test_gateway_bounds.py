"""What a sandbox may not do to its worker: values that no message carries, long prompts, retries, idle connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_site import CallTags, gateway_site

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.gateway import anthropic_messages, chat_completions, door, responses
from prorl_hpc.messages.trajectory import Finish, ToolCall, ToolSchema

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALL = pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
DEEP = '{"n":' + "[" * 100_000 + "]" * 100_000 + "}"


def ask(path: str, text: str, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    common = {"model": "m", **fields, "input" if path == RESPONSES else "messages": said}
    return common | ({"max_tokens": 100} if path == ANTHROPIC else {})


@pytest.mark.parametrize("arguments", ['{"n": 1234567890123456789012}', '{"n": "\\ud800"}', '{"n": NaN}', DEEP])
async def test_arguments_that_no_message_carries_are_refused(chat: ChatFormat, arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    said = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    items = [{"type": "function_call", "call_id": "a", **function}, {"role": "user", "content": "r"}]
    async with gateway_site(chat, [], max_context_tokens=100_000) as site:
        status, answer = await site.post(CHAT, {"model": "m", "messages": said})
        assert status == 400 and answer["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
        status, answer = await site.post(RESPONSES, {"model": "m", "input": items})
        assert status == 400 and answer["error"]["param"] == "input[0].arguments"


async def test_values_that_no_message_carries_are_refused(chat: ChatFormat) -> None:
    deep: dict[str, object] = {}
    for _ in range(600):
        deep = {"items": deep}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 10**30}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [call]}]
    async with gateway_site(chat, []) as site:
        status, answer = await site.post(ANTHROPIC, {"model": "m", "max_tokens": 5, "messages": said})
        assert status == 400 and "messages[1]: it has a number of more than 64 bits" in answer["error"]["message"]
        tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
        status, answer = await site.post(CHAT, ask(CHAT, "p", tools=tools))
        assert status == 400 and answer["error"]["param"] == "tools[0]"
        assert "nested too deeply" in answer["error"]["message"]


async def test_a_turn_that_nobody_can_read_is_text(chat: ChatFormat) -> None:
    class Odd(CallTags):
        def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
            if raw == "huge":
                return ParsedTurn("", "", (ToolCall("f", {"n": 2**80}),))
            raise RecursionError("too deep")

    async with gateway_site(chat, ["huge", "deep"]) as site:
        site.session._format = Odd()
        tools = [{"type": "function", "function": {"name": "f"}}]
        for text in ("huge", "deep"):
            _, body = await site.post(CHAT, ask(CHAT, text, tools=tools))
            assert body["choices"][0]["message"]["content"] == text


@ALL
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_not_delivered_is_given_again(
    chat: ChatFormat, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDKs retry a 500; the turn is trained once."""

    def fails(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

    exchange = {CHAT: chat_completions, RESPONSES: responses, ANTHROPIC: anthropic_messages}[path]._Exchange
    async with gateway_site(chat, ["one", "two"]) as site:
        with monkeypatch.context() as patched:
            patched.setattr(exchange, "answer", fails)
            patched.setattr(exchange, "events", fails)
            for _ in range(2):
                async with site.http.post(path, json=ask(path, "p", stream=stream)) as answer:
                    assert "the gateway broke: UnicodeEncodeError" in await answer.text()
                    assert stream or (answer.status, answer.headers["x-should-retry"]) == (500, "false")
        _, body = await site.post(path, ask(path, "p"))
        assert "one" in str(body) and site.trained(site.trajectory) == ["one"] and not site.trajectory.branches
        _, body = await site.post(path, ask(path, "p"))
        assert "two" in str(body) and len(site.trajectory.branches) == 1, "a second sample"


async def test_a_clients_own_limit_is_no_cut(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["a long answer of many words"]) as site:
        _, body = await site.post(CHAT, ask(CHAT, "title?", max_tokens=3))
        assert body["choices"][0]["finish_reason"] == "length"
        await site.session.close()
        assert site.trajectory.finish is Finish.ENVIRONMENT and not site.trajectory.truncated


async def test_the_tokens_that_are_kept_are_bounded(chat: ChatFormat) -> None:
    async with gateway_site(chat, lambda _: "x", max_tokens=100) as site:
        statuses, body = [], dict[str, Any]()
        while len(statuses) < 50 and not site.session.over:
            status, body = await site.post(CHAT, ask(CHAT, f"{len(statuses)} rewritten"))
            statuses.append(status)
        assert statuses[0] == 200 and statuses[-1] == 403 and "agent.max_tokens" in body["error"]["message"]
        assert sum(part.num_tokens for part in site.trajectory.conversations) <= 102
        await site.session.close()
        assert site.trajectory.finish is Finish.ROLLOUT_TOKENS


async def test_long_prompts_do_not_hold_up_the_others(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    tokenize = chat.first_prompt

    def first_prompt(*given: Any) -> list[int]:
        threads.append(threading.get_ident())
        return tokenize(*given)

    monkeypatch.setattr(chat, "first_prompt", first_prompt)
    async with gateway_site(chat, lambda _: "x", max_context_tokens=100_000, max_calls=2) as site:
        assert (await site.post(CHAT, ask(CHAT, "word " * 10_000)))[0] == 200
        counted = [(await site.post(f"{ANTHROPIC}/count_tokens", ask(CHAT, "word " * 5000)))[0] for _ in range(21)]
        assert counted == [200] * 20 + [403] and not site.session.over
        assert len(threads) == 21 and threading.get_ident() not in threads
    async with gateway_site(chat, [], max_context_tokens=200) as site:
        many = [{"role": "user", "content": "a"}] * 201
        status, body = await site.post(CHAT, {"model": "m", "messages": many})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded" and len(threads) == 21


async def test_connections_without_a_request_are_closed(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "most_connections", lambda: 3)
    async with gateway_site(chat, lambda _: "x", idle_s=0.2) as site:
        idlers = [await asyncio.open_unix_connection(str(site.gateway.socket)) for _ in range(5)]
        idlers[-1][1].write(b"POST /v1/messages HTTP/1.1\r\nx: ")
        assert (await site.post(CHAT, ask(CHAT, "p")))[0] == 200, "one of those that idle makes place"
        for reader, writer in idlers:
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()


def test_long_texts_have_the_ids_of_short_ones(chat: ChatFormat) -> None:
    """They are encoded in another way, which gives up the interpreter's lock."""
    text = "word <|im_end|> answer: 7\n\n " * 1000
    whole = chat._tokens._tokenizer.encode(text, add_special_tokens=False).ids
    assert chat.encode_text(text) == whole and chat.end_of_turn_id not in whole
