"""Whatever a program sends is answered in its API's form, and never breaks the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_site import CallTags, gateway_site, new_context
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.gateway.app import make_app
from prorl_hpc.gateway.session import Session
from prorl_hpc.gateway.strands import Limits
from prorl_hpc.tasks.testing import ScriptedLLM

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "p"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "out"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "max_tokens": 5,
        "stop": ["x"],
    },
    "/v1/responses": {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "p"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "out"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "instructions": "s",
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "p"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "out"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "stop_sequences": ["x"],
    },
}
odd = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "\0", "\U0001f600", "<|im_end|>", "assistant", "{"])
    | st.lists(st.sampled_from([1, "x", {}, []]), max_size=2)
    | st.dictionaries(st.sampled_from(["type", "role", "x"]), st.sampled_from(["text", "image", 1, None]), max_size=2)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def with_odd(value: Any, path: tuple[Any, ...], new: Any, leave_out: bool) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and leave_out:
        del copy[path[0]]
    else:
        copy[path[0]] = with_odd(value[path[0]], path[1:], new, leave_out)
    return copy


async def post(session: Session, path: str, body: Any) -> tuple[int, Any]:
    """To the application itself: a server for each of hundreds of bodies would take minutes."""
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {session.key}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    app = make_app({session.key: session}.get)
    await asyncio.wait_for(app(scope, receive, send), 20)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.mark.parametrize("path", list(GOOD))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_one_odd_value_anywhere(chat: ChatFormat, path: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places(GOOD[path])[1:]))
    body = with_odd(GOOD[path], place, data.draw(odd), data.draw(st.booleans()))
    context = new_context(chat, ScriptedLLM(chat, lambda _: "x"))
    session = Session(context, chat, CallTags(), Limits(10, max_context_tokens=4096), {})
    status, answer = await post(session, path, body)
    assert status in (200, 400), (status, answer)
    assert (status == 200) == (session.calls == 1) and not session.over
    if status == 400:
        assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", list(GOOD))
async def test_the_bodies_themselves_are_good(chat: ChatFormat, path: str) -> None:
    async with gateway_site(chat, ["x"]) as site:
        status, answer = await site.post(path, GOOD[path])
        assert status == 200, answer


@pytest.mark.parametrize("path", list(GOOD))
async def test_bodies_that_are_no_text_or_far_too_large(chat: ChatFormat, path: str) -> None:
    async with gateway_site(chat, []) as site:
        for data in (b'{"model": "\\ud800", "messages": []}', b"[" * 100_000, b"\xff\xfe"):
            async with site.http.post(path, data=data) as answer:
                assert answer.status == 400 and (await answer.json())["error"]
        async with site.http.post(path, data=b" " * (2**16 + 64 * 4096 + 1)) as answer:
            assert answer.status == 413 and "more than 327680 bytes" in (await answer.json())["error"]["message"]
