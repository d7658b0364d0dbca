"""POST /v1/responses as OpenAI has it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_site import gateway_site

from prorl_hpc.agents.chat_format import ChatFormat

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALLING = '<think>hm</think>so <call>{"name": "bash", "arguments": {"b": 1, "a": "x"}}</call>'


def ask(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-any", "input": given, **fields}


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_and_thought(chat: ChatFormat, stream: bool, by_id: bool) -> None:
    async with gateway_site(chat, [CALLING, "done"]) as site:
        body = ask("hi", instructions="s", tools=[TOOL], tool_choice="auto")
        if stream:
            events = await site.stream(PATH, body)
            assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
            assert [name for name, _ in events] == [data["type"] for _, data in events]
            assert [events[i][0] for i in (0, 1, -1)] == [
                "response.created",
                "response.in_progress",
                "response.completed",
            ]
            first = events[-1][1]["response"]
            done = [data["item"] for name, data in events if name == "response.output_item.done"]
            assert done == first["output"]
            deltas = [d["delta"] for name, d in events if name == "response.function_call_arguments.delta"]
            assert "".join(deltas) == first["output"][2]["arguments"]
        else:
            first = (await site.post(PATH, body))[1]
        assert (first["status"], first["object"], first["model"]) == ("completed", "response", "gpt-any")
        thought, said, call = first["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and text_of(first) == "so"
        assert said["role"] == "assistant"
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "bash", '{"b": 1, "a": "x"}')
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "out"}
        if by_id:
            body = ask([result], previous_response_id=first["id"], instructions="s", tools=[TOOL])
        else:
            body = ask([{"role": "user", "content": "hi"}, *first["output"], result], instructions="s", tools=[TOOL])
        _, last = await site.post(PATH, body)
        assert text_of(last) == "done" and last["previous_response_id"] == (first["id"] if by_id else None)
        assert site.trajectory.branches == [] and site.trained(site.trajectory) == [CALLING, "done"]
        assert site.trajectory.messages[3].name == "bash"


async def test_limits_and_logprobs(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["a long answer"]) as site:
        include = ["message.output_text.logprobs"]
        _, answer = await site.post(PATH, ask("hi", max_output_tokens=2, include=include))
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert "".join(one["token"] for one in logprobs) == text_of(answer) and logprobs[0]["logprob"] == -0.5
        assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 2


async def test_responses_that_are_not_there(chat: ChatFormat) -> None:
    async with gateway_site(chat, ["one"]) as site:
        _, first = await site.post(PATH, ask("hi", store=False))
        for name in (first["id"], "resp_of_another"):
            status, body = await site.post(PATH, ask("on", previous_response_id=name))
            assert status == 400 and body["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(chat: ChatFormat, fields: dict[str, Any], field: str) -> None:
    async with gateway_site(chat, []) as site:
        status, body = await site.post(PATH, ask("hi") | fields)
        assert status == 400 and body["error"]["param"] == field, body
        assert field in body["error"]["message"] and site.session.calls == 0
