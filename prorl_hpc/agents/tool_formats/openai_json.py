"""OpenAI's JSON as plain text: ``{"type": "function", "function": {"name": …, "arguments": "{…}"}}``, alone, in a list, in
``{"tool_calls": […]}`` or in a fenced block; plain ``{"name": …, "arguments": {…}}`` too. For models that are told to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, call_from, kind_of, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_KEYS = "name|arguments|parameters|type|id|function|tool_calls|content|role"
_OPEN = re.compile(rf'(?:```(?:json)?\s*)?(?:\[\s*)?(?=\{{\s*"(?:{_KEYS})"\s*:)')
_END = re.compile(r"\s*,?\s*\]?\s*(?:```)?")
_REST = re.compile(r"\n|\}\s*(?:\]|```|\Z)")
_EXAMPLE = '{"name": "TOOL", "arguments": {…}}'


class OpenAIJson:
    """A ToolFormat."""

    name = "json"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        names = [tool.name for tool in tools]
        while turn.seek_call():
            start = turn.at
            try:
                value = turn.read_object()
                if not _is_call(value, names):
                    turn.add_content(turn.text[start : turn.at])
                    continue
                for entry in _entries(value):
                    turn.add(call_from(entry, text_arguments=True))
                content = value.get("content")
                turn.add_content(content if isinstance(content, str) else "")
            except Malformed as error:
                turn.add_problem(f"a call {error}: write {_EXAMPLE}")
                turn.at = max(turn.at, start + 1)
                turn.skip_to(_REST)
            turn.take(_END)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        function = {"name": call.name, "arguments": write_json(call.arguments)}
        head = {"id": call.call_id} if call.call_id else {}
        return write_json({**head, "type": "function", "function": function})


def _is_call(value: dict[str, Any], names: list[str]) -> bool:
    if "tool_calls" in value or isinstance(value.get("function"), dict):
        return True
    return "name" in value and ("arguments" in value or "parameters" in value or value["name"] in names)


def _entries(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each call's name, arguments and id."""
    entries = value.get("tool_calls") if "tool_calls" in value else [value]
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict):
            raise Malformed(f"has {kind_of(entry)} as a call, expected an object")
        function = entry.get("function")
        yield {**function, "id": entry.get("id")} if isinstance(function, dict) else entry
