"""Hermes 2 Pro, Qwen2.5, Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, call_from, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(r"<tool_call>")
_CLOSE = re.compile(r"</tool_call>")
_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_EXAMPLE = '<tool_call>{"name": "TOOL", "arguments": {…}}</tool_call>'


class Hermes:
    """A ToolFormat."""

    name = "hermes"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while turn.seek_call():
            try:
                call = call_from(turn.read_object())
                turn.expect(_END, "</tool_call>")
                turn.add(call)
            except Malformed as error:
                turn.add_problem(f"a <tool_call> {error}: write {_EXAMPLE}")
                turn.skip_to(_CLOSE)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        return f"<tool_call>\n{write_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
