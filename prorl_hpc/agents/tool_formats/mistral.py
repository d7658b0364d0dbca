"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` up to tokenizer v7, ``[TOOL_CALLS]name[ARGS]{…}`` from v11
on, one after another; v11 has ``[CALL_ID]id`` before ``[ARGS]``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, call_from, kind_of, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(r"\[TOOL_CALLS\]\s*")
_NAMED = re.compile(r"([^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+([^\s\[\]{}]*+)\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_END = re.compile(r"\s*+(?=\[TOOL_CALLS\]|\Z)")
_NOTHING = re.compile(r"(?=\n)")
_EXAMPLE = '[TOOL_CALLS][{"name": "TOOL", "arguments": {…}}] or [TOOL_CALLS]TOOL[ARGS]{…}'


class Mistral:
    """A ToolFormat. ``write`` writes the older form, which most templates on the model hubs have."""

    name = "mistral"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while turn.seek_call():
            try:
                turn.add(*self._calls(turn))
                turn.take(_END)
            except Malformed as error:
                turn.add_problem(f"what follows [TOOL_CALLS] {error}: write {_EXAMPLE}")
                turn.skip_to(_NOTHING)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        entry = {"name": call.name, "arguments": call.arguments} | ({"id": call.call_id} if call.call_id else {})
        return f"[TOOL_CALLS]{write_json([entry])}"

    def _calls(self, turn: TurnReader) -> list[ToolCall]:
        if named := turn.take(_NAMED):
            return [ToolCall(named[1], turn.read_object(), named[2] or "")]
        if turn.text[turn.at : turn.at + 1] not in ("[", "{"):
            raise Malformed("is no call" if turn.text[turn.at :].strip() else "is cut off")
        value = turn.read_value()
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if not isinstance(entry, dict):
                raise Malformed(f"has {kind_of(entry)} in its list, expected objects")
        return [call_from(entry) for entry in entries]
