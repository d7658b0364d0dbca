"""A fenced block whose language is bash, for models without a tool format of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.reading import TurnReader
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(r"^[ \t]*(?P<fence>`{3,})(?:bash|sh|shell)[ \t]*\n", re.MULTILINE)
_NEVER = re.compile(r"(?!)")


class BashBlock:
    """A ToolFormat whose only tool is ``bash`` with the argument ``command``. A longer fence holds a command that has fences."""

    name = "bash_block"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while opening := turn.seek_call():
            fence = opening["fence"]
            body = turn.take(re.compile(rf"(.*?)\n?^[ \t]*{fence}[ \t]*$", re.DOTALL | re.MULTILINE))
            if body:
                turn.add(ToolCall("bash", {"command": body[1]}))
            else:
                turn.add_problem(f"a bash block is cut off: close it with a line {fence}")
                turn.skip_to(_NEVER)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        """ValueError for anything but ``bash`` with one text ``command``."""
        command = call.arguments.get("command")
        if call.name != "bash" or len(call.arguments) != 1 or not isinstance(command, str):
            raise ValueError(f"the format bash_block writes calls of bash with a command alone, not {call.name}")
        longest = max(map(len, re.findall(r"`+", command)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}bash\n{command}\n{fence}"
