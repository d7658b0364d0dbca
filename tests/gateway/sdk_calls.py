"""Run by the outside agents' Python: each case is a conversation with a tool, through a real SDK; prints what it got."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def openai_client(socket: str, key: str) -> Any:
    import httpx
    import openai

    transport = httpx.HTTPTransport(uds=socket)
    return openai.OpenAI(api_key=key, base_url="http://gateway/v1", http_client=httpx.Client(transport=transport))


def anthropic_client(socket: str, key: str) -> Any:
    import anthropic
    import httpx2

    transport = httpx2.HTTPTransport(uds=socket)
    return anthropic.Anthropic(api_key=key, base_url="http://gateway", http_client=httpx2.Client(transport=transport))


def chat(client: Any, stream: bool) -> list[str]:
    function = {"name": "bash", "description": "run", "parameters": SCHEMA}
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    common: dict[str, Any] = {"model": "gpt-4o", "tools": [{"type": "function", "function": function}]}

    def ask() -> Any:
        if not stream:
            return client.chat.completions.create(messages=messages, **common).choices[0].message
        with client.chat.completions.stream(messages=messages, **common) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    first = ask()
    call = first.tool_calls[0]
    messages.append(first.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "out"})
    return [call.function.name, json.loads(call.function.arguments)["command"], ask().content]


def responses(client: Any, stream: bool) -> list[str]:
    common: dict[str, Any] = {
        "model": "gpt-5",
        "instructions": "s",
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}],
    }

    def ask(given: Any, **fields: Any) -> Any:
        if not stream:
            return client.responses.create(input=given, **common, **fields)
        with client.responses.stream(input=given, **common, **fields) as events:
            for _ in events:
                pass
            return events.get_final_response()

    first = ask("hi")
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "out"}
    second = ask([result], previous_response_id=first.id)
    return [call.name, json.loads(call.arguments)["command"], second.output_text]


def messages(client: Any, stream: bool) -> list[str]:
    said: list[Any] = [{"role": "user", "content": "hi"}]
    common: dict[str, Any] = {
        "model": "claude-opus-4-5",
        "max_tokens": 200,
        "system": "s",
        "tools": [{"name": "bash", "description": "run", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }

    def ask() -> Any:
        if not stream:
            return client.messages.create(messages=said, **common)
        with client.messages.stream(messages=said, **common) as events:
            for _ in events:
                pass
            return events.get_final_message()

    first = ask()
    call = next(block for block in first.content if block.type == "tool_use")
    assert [block.thinking for block in first.content if block.type == "thinking"] == ["hm"]
    said.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "out"}]})
    assert client.messages.count_tokens(messages=said, model=common["model"]).input_tokens > 0
    return [call.name, call.input["command"], next(block.text for block in ask().content if block.type == "text")]


def openai_refusals(client: Any, stream: bool) -> list[str]:
    import openai

    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    found = []
    for fields in ({"n": 2}, {"messages": [{"role": "user", "content": "long " * 3000}]}, {}):
        try:
            client.chat.completions.create(**asked | fields)
        except openai.APIStatusError as error:
            found.append(f"{type(error).__name__} {error.param} {error.code}")
    wrong = client.with_options(api_key="wrong")
    try:
        wrong.models.list()
    except openai.AuthenticationError as error:
        found.append(str(error.code))
    return [*found, client.models.list().data[0].id]


def anthropic_refusals(client: Any, stream: bool) -> list[str]:
    import anthropic

    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    found = []
    for fields in ({"tool_choice": {"type": "any"}}, {"messages": [{"role": "user", "content": "long " * 3000}]}, {}):
        try:
            client.messages.create(**asked | fields, stream=stream)
        except anthropic.APIStatusError as error:
            found.append(f"{type(error).__name__} {error.body['error']['type']}")
    wrong = client.with_options(api_key="wrong")
    try:
        wrong.models.list()
    except anthropic.AuthenticationError as error:
        found.append(error.body["error"]["type"])
    return [*found, client.models.list().data[0].id]


CASES: dict[str, tuple[Callable[[str, str], Any], Callable[[Any, bool], list[str]]]] = {
    "chat": (openai_client, chat),
    "responses": (openai_client, responses),
    "messages": (anthropic_client, messages),
    "openai_refusals": (openai_client, openai_refusals),
    "anthropic_refusals": (anthropic_client, anthropic_refusals),
}

if __name__ == "__main__":
    name, mode, socket_path, session_key = sys.argv[1:]
    make, case = CASES[name]
    print(json.dumps(case(make(socket_path, session_key), mode == "stream")))
