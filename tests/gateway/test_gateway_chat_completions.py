"""POST /v1/chat/completions as OpenAI has it, and token-exact conversations behind it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_site import gateway_site

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.messages.trajectory import Finish

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}},
}


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "any-name", "messages": list(messages), **fields}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_conversation_is_one_trajectory_of_the_engines_ids(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["one  ", "two"]) as site:
        status, first = await site.post(PATH, ask({"role": "system", "content": "s"}, user("hi")))
        assert (status, first["object"], first["model"]) == (200, "chat.completion", "any-name")
        choice = first["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "one  "
        assert first["usage"]["completion_tokens"] == len(chat.encode_text("one  ")) + 1
        back = {"role": "assistant", "content": "one"}  # white space lost on the way
        await site.post(
            PATH, ask({"role": "system", "content": "s"}, user("hi"), back, user([{"type": "text", "text": "go"}]))
        )
        assert site.trajectory.branches == []
        assert site.trained(site.trajectory) == ["one  ", "two"]
        assert site.text(site.trajectory) == (
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none  <|im_end|>\n"
            "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
        )
        assert (site.session.calls, site.session.last_text) == (2, "two")


async def test_tool_calls_come_back_in_other_words_and_are_recognized(chat: ChatFormat) -> None:
    turn = '<think>hm</think>so <call>{"name": "bash", "arguments": {"b": 1, "a": "x"}}</call>'
    async with gateway_site(chat, [turn, "done"]) as site:
        _, first = await site.post(PATH, ask(user("hi"), tools=[TOOL], tool_choice="auto"))
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] == "so" and message["reasoning_content"] == "hm"
        call = message["tool_calls"][0]
        assert call["function"] == {"name": "bash", "arguments": '{"b": 1, "a": "x"}'}
        call["function"]["arguments"] = '{"a":"x","b":1}'
        back = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "out"}
        _, second = await site.post(PATH, ask(user("hi"), back, result, tools=[TOOL]))
        assert second["choices"][0]["message"]["content"] == "done"
        assert site.trajectory.branches == [] and site.trained(site.trajectory) == [turn, "done"]
        written = site.trajectory.messages[2]
        assert (written.role, written.name, written.call_id, written.content) == ("tool", "bash", call["id"], "out")


async def test_wrong_key(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["x"]) as site:
        status, body = await site.post(PATH, ask(user("hi")), Authorization="Bearer wrong")
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
        assert site.session.calls == 0


async def test_too_many_calls(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["x"], max_calls=1) as site:
        await site.post(PATH, ask(user("hi")))
        for _ in range(2):
            status, body = await site.post(PATH, ask(user("hi")))
            assert status == 403 and "agent.max_calls" in body["error"]["message"]
        assert site.session.over and site.trajectory.finish is Finish.TURNS
        assert len(site.llm.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_end_the_text_and_keep_the_ids(chat: ChatFormat, stream: bool) -> None:
    async with gateway_site(chat, ["a STOP b", "next"]) as site:
        body = ask(user("hi"), stop=["STOP"], stream=stream)
        if stream:
            events = await site.stream(PATH, body)
            text = "".join(e[1]["choices"][0]["delta"].get("content") or "" for e in events if e[1] != "[DONE]")
            assert events[-1][1] == "[DONE]"
        else:
            text = (await site.post(PATH, body))[1]["choices"][0]["message"]["content"]
        assert text == "a "
        await site.post(PATH, ask(user("hi"), {"role": "assistant", "content": text}, user("more")))
        assert site.trained(site.trajectory) == ["a STOP b", "next"]
