"""Llama 3: ``{"name": …, "parameters": {…}}``, several of them one after another or with ``;`` between; perhaps after
``<|python_tag|>``, which may also begin a call of a built-in tool (``brave_search.call(query="…")``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.pythonic import read_call
from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, call_from, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(
    r'<\|python_tag\|>\s*(?=\{)|<\|python_tag\|>|(?=\{\s*"(?:name|parameters|arguments|type|function)"\s*:)'
)
_BUILT_IN = re.compile(r"\s*([A-Za-z_]\w*)\.call(?=\()")
_SEPARATOR = re.compile(r"\s*(?:;|<\|eom_id\|>)\s*|\s*")
_REST = re.compile(r"\}\s*(?:;|\n|\Z)")
_EXAMPLE = '{"name": "TOOL", "parameters": {…}}'


class LlamaJson:
    """A ToolFormat."""

    name = "llama_json"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        names = [tool.name for tool in tools]
        while opening := turn.seek_call():
            start = turn.at
            try:
                if built_in := turn.take(_BUILT_IN):
                    turn.add(read_call(turn, built_in[1]))
                elif opening[0] and turn.text[turn.at : turn.at + 1] != "{":
                    raise Malformed("is neither JSON nor NAME.call(…)")
                else:
                    value = turn.read_object()
                    value = value["function"] if isinstance(value.get("function"), dict) else value
                    if "parameters" in value or "arguments" in value or value.get("name") in names:
                        turn.add(call_from(value))
                    else:
                        turn.add_content(turn.text[start : turn.at])
                        continue
            except Malformed as error:
                turn.add_problem(f"a call {error}: write {_EXAMPLE}")
                turn.at = max(turn.at, start + 1)
                turn.skip_to(_REST)
            turn.take(_SEPARATOR)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        return write_json({"name": call.name, "parameters": call.arguments})
