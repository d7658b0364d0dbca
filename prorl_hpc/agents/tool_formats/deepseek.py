"""DeepSeek V3 and R1 (``…function<｜tool▁sep｜>NAME`` and a fenced block of JSON) and V3.1 (``…NAME<｜tool▁sep｜>{…}``), each
between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``, all between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OPEN = re.compile(rf"(?:{BEGIN}\s*)?{CALL}|{BEGIN}")
_HEAD = re.compile(rf"\s*+([^<\n]*+)\s*+{SEPARATOR}")
_FENCE = re.compile(r"\s*+([^\n]*+)\n\s*+```(?:json)?\s*+(?=\{)")
_FENCE_END = re.compile(r"\s*```")
_REST = re.compile(rf"{CALL_END}(?:\s*+{END})?|{END}")
_CALL_END = re.compile(rf"\s*+(?:{_REST.pattern}|\Z)")
_EXAMPLE = f"{BEGIN}{CALL}TOOL{SEPARATOR}{{…}}{CALL_END}{END}"


class DeepSeek:
    """A ToolFormat. ``write`` writes V3.1's form."""

    name = "deepseek"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while opening := turn.seek_call():
            try:
                if not opening[0].endswith(CALL):
                    raise Malformed(f"has no {CALL} after {BEGIN}")
                turn.add(self._call(turn))
            except Malformed as error:
                turn.add_problem(f"a call {error}: write {_EXAMPLE}")
                turn.skip_to(_REST)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        """ValueError where the tool's name is none that can be told from the rest."""
        if not call.name or call.name != call.name.strip() or any(sign in call.name for sign in "\n<｜"):
            raise ValueError(f"the format deepseek cannot write the tool's name {call.name!r}")
        return f"{BEGIN}{CALL}{call.name}{SEPARATOR}{write_json(call.arguments)}{CALL_END}{END}"

    def _call(self, turn: TurnReader) -> ToolCall:
        name = turn.expect(_HEAD, SEPARATOR)[1].strip()
        fence = turn.take(_FENCE) if name == "function" else None
        if fence:
            name = fence[1].strip()
        if not name:
            raise Malformed("names no tool")
        arguments = turn.read_object()
        if fence:
            turn.expect(_FENCE_END, "```")
        turn.expect(_CALL_END, CALL_END)
        return ToolCall(name, arguments)
