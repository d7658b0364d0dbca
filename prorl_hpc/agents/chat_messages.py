"""Messages and tools as a template is to be given them: texts placed in slots, and what the template cannot write itself
(tools, system messages, results) put into messages that it can."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from prorl_hpc.agents.chat_dialect import Dialect, call_dict
from prorl_hpc.agents.chat_slots import Slots, slot_of, to_json
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema

ROLES = ("system", "developer", "user", "assistant", "tool")
_HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\nFor each function call, return a json "
    "object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
_OTHER = (
    "# Tools\n\nYou may call functions to assist with the user query. These are there:\n{tools}\n\nWrite a call like "
    "this one of bash, with the name and arguments of the function that you want:\n{example}"
)
_EXAMPLE = ToolCall("bash", {"command": "ls"}, "000000000")


@dataclass
class Prepared:
    """``messages`` and ``tools`` are for the template, ``must`` are the slots that it has to write, each once."""

    slots: Slots = field(default_factory=Slots)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    must: list[tuple[int, str]] = field(default_factory=list)
    """Slot, and whose it is in words."""


def prepare(
    dialect: Dialect, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, first: bool = True
) -> Prepared:
    """``first``: the conversation begins with ``messages``. ValueError for a role that is not one of ROLES."""
    prepared = Prepared()
    plain = [_with_role_of(dialect, message, first and i == 0) for i, message in enumerate(messages)]
    described = ""
    if tools and dialect.tells_tools:
        prepared.tools = [_tool_dict(prepared.slots, tool) for tool in tools]
        prepared.must += [
            (slot, "the name of a tool") for tool in prepared.tools if (slot := _name_slot(tool)) is not None
        ]
    elif tools:
        described = _description(dialect, tools, prepared.slots)
    entries = [_entry(prepared, dialect, message, i) for i, message in enumerate(plain)]
    prepared.messages = _fold(dialect, entries, described, first)
    return prepared


def _with_role_of(dialect: Dialect, message: Message, opens: bool) -> Message:
    """The message in a role that the template has."""
    role = message.role
    if role not in ROLES:
        raise ValueError(f"a message has the role {role!r}: there are {', '.join(ROLES)}")
    if role == "developer":
        role = "system"
    if role == "system" and not (opens or dialect.later_system):
        role = "user"
    if role == "tool" and not dialect.tool_role:
        return replace(message, role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if message.tool_calls and not dialect.calls:
        write = get_tool_format(dialect.tool_format).write
        texts = [message.content, *map(write, message.tool_calls)]
        return replace(message, content="\n".join(filter(None, texts)), tool_calls=[])
    return replace(message, role=role)


def _entry(prepared: Prepared, dialect: Dialect, message: Message, number: int) -> dict[str, Any]:
    """One message as templates are given it."""
    slots = prepared.slots
    content = slots.place(message.content)
    entry: dict[str, Any] = {"role": message.role, "content": content}
    slot = slot_of(content)
    # Templates may leave out what is said beside a call.
    if slot is not None and not message.tool_calls:
        prepared.must.append((slot, f"message {number + 1} ({message.role})"))
    if message.role == "tool":
        entry["name"] = slots.place_name(message.name)
        entry["tool_call_id"] = slots.place_name(_call_id(dialect, message.call_id, message.name, number))
    if message.tool_calls:
        entry["tool_calls"] = [
            call_dict(
                slots,
                call.name,
                slots.place_value(call.arguments),
                _call_id(dialect, call.call_id, call.name, number + i + 1),
                dialect.arguments_as_text,
            )
            for i, call in enumerate(message.tool_calls)
        ]
        if not message.content and dialect.none_content:
            entry["content"] = None
    if message.reasoning:
        _add_reasoning(dialect, entry, slots.place(message.reasoning))
    return entry


def _add_reasoning(dialect: Dialect, entry: dict[str, Any], reasoning: str) -> None:
    for key in dialect.reasoning_keys:
        entry[key] = reasoning
    if dialect.results_one_by_one and entry.get("tool_calls") and entry["content"]:
        # Harmony has one thought before a call, and takes either of the two for it.
        entry[dialect.reasoning_keys[0]] = f"{reasoning}\n{entry['content']}"
        entry["content"] = ""


def _call_id(dialect: Dialect, call_id: str, name: str, number: int) -> str:
    """``call_id``, or one made of it that has the length that the template demands."""
    if not dialect.call_id_length or len(call_id) == dialect.call_id_length:
        return call_id
    digest = hashlib.sha256(f"{call_id or (name, number)}".encode()).hexdigest()
    return digest[: dialect.call_id_length]


def _fold(dialect: Dialect, entries: list[dict[str, Any]], described: str, first: bool) -> list[dict[str, Any]]:
    """Puts tools and the system message where the template can write them, and joins what must not follow one another."""
    if described:
        if entries and entries[0]["role"] == "system":
            entries[0]["content"] = _join(entries[0]["content"], described)
        else:
            entries.insert(0, {"role": "system", "content": described})
    if first and not dialect.system and len(entries) > 1 and entries[0]["role"] == "system":
        system = entries.pop(0)
        if entries[0]["role"] == "user":
            entries[0]["content"] = _join(system["content"], entries[0]["content"])
        else:
            entries.insert(0, {"role": "user", "content": system["content"]})
    if not dialect.alternates:
        return entries
    folded: list[dict[str, Any]] = []
    for role, group in groupby(entries, key=lambda entry: entry["role"]):
        members = list(group)
        folded += [{"role": role, "content": _join(*(m["content"] for m in members))}] if role == "user" else members
    return folded


def _join(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _tool_dict(slots: Slots, tool: ToolSchema) -> dict[str, Any]:
    function = {
        "name": slots.place_name(tool.name),
        "description": slots.place(tool.description),
        "parameters": slots.place_value(tool.parameters, schema=True),
    }
    return {"type": "function", "function": function}


def _name_slot(tool: dict[str, Any]) -> int | None:
    return slot_of(tool["function"]["name"])


def _description(dialect: Dialect, tools: Sequence[ToolSchema], slots: Slots) -> str:
    """What the system message says of ``tools``."""
    lines = "\n".join(to_json(_tool_dict(slots, tool)) for tool in tools)
    if dialect.tool_format == "hermes":
        return _HERMES.format(tools=lines)
    return _OTHER.format(tools=lines, example=get_tool_format(dialect.tool_format).write(_EXAMPLE))
