"""The input items of OpenAI Responses as messages."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from prorl_hpc.gateway.calls import invalid
from prorl_hpc.gateway.fields import read_arguments, read_fields
from prorl_hpc.messages.trajectory import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class _Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Said(Struct):
    role: str
    content: str | list[_Part]


class _Call(Struct):
    name: str
    call_id: str
    arguments: str = ""


class _Output(Struct):
    call_id: str
    output: str | list[_Part]


class _Thought(Struct):
    summary: list[_Part] = []
    content: list[_Part] | None = None


def read_items(given: str | list[dict[str, Any]]) -> list[Message]:
    """What the assistant thought, said and called in a row is one message. Raises Refusal."""
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    for i, item in enumerate(given):
        message = _read(item, f"input[{i}]")
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _read(item: dict[str, Any], where: str) -> Message:
    match item.get("type") or "message":
        case "message":
            said = read_fields(item, _Said, where)
            if said.role not in _ROLES:
                raise invalid(f"{where}.role", f"{said.role!r} is not possible; allowed: {', '.join(_ROLES)}")
            return Message(_ROLES[said.role], _text(said.content, f"{where}.content"))
        case "function_call":
            call = read_fields(item, _Call, where)
            made = ToolCall(call.name, read_arguments(call.arguments, f"{where}.arguments"), call.call_id)
            return Message("assistant", "", tool_calls=[made])
        case "function_call_output":
            output = read_fields(item, _Output, where)
            return Message("tool", _text(output.output, f"{where}.output"), call_id=output.call_id)
        case "reasoning":
            thought = read_fields(item, _Thought, where)
            return Message("assistant", "", reasoning=_text(thought.content or thought.summary, where))
        case kind:
            allowed = "message, function_call, function_call_output, reasoning"
            raise invalid(f"{where}.type", f"{str(kind)[:80]!r} is not possible; allowed: {allowed}")


def _text(content: str | list[_Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for k, part in enumerate(content):
        text = part.text if part.type in _TEXTS else part.refusal if part.type == "refusal" else None
        if text is None:
            raise invalid(f"{where}[{k}]", f"a part of type {part.type!r} is not possible; the policy reads text only")
        texts.append(text)
    return "\n".join(texts)


def _joined(first: Message, second: Message) -> Message:
    return Message(
        "assistant",
        "\n".join(text for text in (first.content, second.content) if text),
        tool_calls=[*first.tool_calls, *second.tool_calls],
        reasoning="\n".join(text for text in (first.reasoning, second.reasoning) if text),
    )
