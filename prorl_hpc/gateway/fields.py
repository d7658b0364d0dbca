"""Reading requests: what is wrong is refused with the name of the field, as the API has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from prorl_hpc.agents.tool_formats.reading import carriable_problem
from prorl_hpc.gateway.calls import Refusal, Trouble, invalid
from prorl_hpc.messages.trajectory import Message, ToolSchema

T = TypeVar("T")

_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")


def read_fields(body: Mapping[str, Any], kind: type[T], within: str = "") -> T:
    """``body`` as ``kind``; fields that ``kind`` does not have are ignored. ``within``: where ``body`` lies."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        missing = re.search(r"missing required field `([^`]+)`", str(error))
        parts = [within, where[1] if where else "", missing[1] if missing else ""]
        field = ".".join(part for part in parts if part)
        raise Refusal(Trouble.INVALID, f"{field}: {_WHERE.sub('', str(error))}", field) from error


def refuse_others(body: Mapping[str, Any], allowed: Mapping[str, Sequence[object]], why: str) -> None:
    """Of the fields in ``allowed``, only these values are possible; leaving one out, or null, always is."""
    for name, values in allowed.items():
        given = body.get(name)
        if given is not None and given not in values:
            words = " or ".join(json.dumps(value) for value in values)
            raise invalid(
                name, f"{json.dumps(given)[:200]} is not possible here ({why}); allowed: {words or 'nothing'}"
            )


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """A call's arguments, which OpenAI's APIs have as JSON text."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{text[:200]!r} is not JSON ({error}); a JSON object is expected") from error
    if problem := carriable_problem(value):
        raise invalid(field, f"{text[:200]!r} {problem}")
    if not isinstance(value, dict):
        raise invalid(field, f"{text[:200]!r} is not a JSON object")
    return value


def check_tools(tools: Sequence[ToolSchema], field: str = "tools") -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if not tool.name:
            raise invalid(f"{field}[{i}]", "a tool needs a name")
        if tool.name in seen:
            raise invalid(f"{field}[{i}]", f"there are two tools named {tool.name!r}")
        seen.add(tool.name)


def limit_of(field: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise invalid(field, f"{value} is not possible; at least 1")
    return value


def check_conversation(messages: Sequence[Message], field: str = "messages") -> None:
    """There must be something to answer."""
    if not any(message.role != "system" for message in messages):
        raise invalid(field, "no message to answer; at least one of the user is needed")
    if messages[-1].role == "assistant":
        raise invalid(field, "the last message is the assistant's, whose turn cannot be continued here")


def name_results(messages: list[Message]) -> None:
    """Tools' messages get the name of the tool whose call they answer, which some templates write."""
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        names |= {call.call_id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name and message.call_id in names:
            messages[i] = Message("tool", message.content, names[message.call_id], message.call_id)
