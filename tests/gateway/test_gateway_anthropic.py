"""POST /v1/messages as Anthropic has it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_site import gateway_site

from prorl_hpc.agents.chat_format import ChatFormat

PATH = "/v1/messages"
TOOL = {"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {}}}
CALLING = '<think>hm</think>so <call>{"name": "bash", "arguments": {"b": 1, "a": "x"}}</call>'


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "claude-any", "max_tokens": 100, "messages": list(messages), **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assembled(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that the SDK would put together."""
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    message = dict(events[0][1]["message"])
    blocks: list[dict[str, Any]] = []
    for name, data in events[1:]:
        if name == "content_block_start":
            blocks.append(dict(data["content_block"]))
        elif name == "content_block_delta":
            delta = {k: v for k, v in data["delta"].items() if k != "type"}
            for key, value in delta.items():
                blocks[data["index"]][key] = blocks[data["index"]].get(key, "") + value
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] = {**message["usage"], **data["usage"]}
    return {**message, "content": blocks}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_and_thought(chat: ChatFormat, stream: bool) -> None:
    async with gateway_site(chat, [CALLING, "done"]) as site:
        common = {"system": [{"type": "text", "text": "s"}], "tools": [TOOL], "tool_choice": {"type": "auto"}}
        body = ask(user("hi"), thinking={"type": "enabled", "budget_tokens": 1024}, **common)
        if stream:
            message = assembled(await site.stream(PATH, body))
            partial = message["content"][2].pop("partial_json")
            assert partial == '{"b": 1, "a": "x"}'
            message["content"][2]["input"] = {"a": "x", "b": 1}
        else:
            message = (await site.post(PATH, body))[1]
        assert message["stop_reason"] == "tool_use" and message["model"] == "claude-any"
        thought, text, call = message["content"]
        assert thought["thinking"] == "hm" and text == {"type": "text", "text": "so"}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "bash", {"a": "x", "b": 1})
        assert message["usage"]["output_tokens"] == len(chat.encode_text(CALLING)) + 1
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "out"}]}
        marked = {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}
        back = {"role": "assistant", "content": [text, call]}  # without the thought
        _, last = await site.post(PATH, ask(user("hi"), back, user([result, marked]), **common))
        assert last["content"] == [{"type": "text", "text": "done"}] and last["stop_reason"] == "end_turn"
        assert site.trajectory.branches == [] and site.trained(site.trajectory) == [CALLING, "done"]
        assert [m.role for m in site.trajectory.messages] == [
            "system",
            "user",
            "assistant",
            "tool",
            "user",
            "assistant",
        ]
        assert site.trajectory.messages[3].name == "bash"


async def test_stop_sequences_and_limits(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["a STOP b", "a long answer"]) as site:
        _, first = await site.post(PATH, ask(user("hi"), stop_sequences=["STOP"]))
        assert (first["stop_reason"], first["stop_sequence"]) == ("stop_sequence", "STOP")
        assert first["content"] == [{"type": "text", "text": "a "}]
        _, second = await site.post(PATH, ask(user("other"), max_tokens=2))
        assert second["stop_reason"] == "max_tokens" and second["usage"]["output_tokens"] == 2
        assert "thinking" not in {block["type"] for block in second["content"]}


async def test_tokens_are_counted_as_they_would_be_written(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["x"]) as site:
        body = {"model": "m", "messages": [user("hi there")], "system": "s"}
        status, counted = await site.post(PATH + "/count_tokens", body)
        _, answered = await site.post(PATH, ask(user("hi there"), system="s"))
        assert status == 200 and counted == {"input_tokens": answered["usage"]["input_tokens"]}
        assert site.session.calls == 1


async def test_refusals_are_in_anthropics_form(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["x"], max_calls=1, max_context_tokens=40) as site:
        status, body = await site.post(PATH, ask(user("hi")), **{"Authorization": "", "x-api-key": "wrong"})
        assert status == 401 and body["type"] == "error" and body["error"]["type"] == "authentication_error"
        status, body = await site.post(PATH, ask(user("long " * 100)))
        assert status == 400 and "prompt is too long" in body["error"]["message"]
        status, body = await site.post(PATH, ask(user("hi")))
        assert status == 403 and body["error"]["type"] == "permission_error"
        status, body = await site.post(PATH + "/nowhere", {})
        assert status == 404 and body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type"),
        ({"messages": [user("a"), {"role": "assistant", "content": "so"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(chat: ChatFormat, fields: dict[str, Any], field: str) -> None:
    async with gateway_site(chat, []) as site:
        status, body = await site.post(PATH, ask(user("hi")) | fields)
        assert status == 400 and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(f"{field}: ")
        assert site.session.calls == 0
