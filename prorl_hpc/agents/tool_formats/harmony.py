"""gpt-oss: messages in channels. ``analysis`` is thought, ``commentary`` with ``to=functions.NAME`` a call, without it text,
``final`` the answer. A turn is what follows the prompt's ``<|start|>assistant``; a call ends it (``<|call|>``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, write_json
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?:\s{0,3}(?<![^\s>])to=(?P<to>[^\s<>]++))?\s{0,3}<\|channel\|>(?P<channel>[a-z]*+)"
    r"(?P<more>[^<]*+(?:<\|constrain\|>[^<]*+)?)<\|message\|>"
)
_CUT_HEADER = re.compile(r"<\|(?:start|channel)\|>")
_OPEN = re.compile(rf"{_HEADER.pattern}|{_CUT_HEADER.pattern}")
_TO = re.compile(r"\bto=([^\s<>]+)")
_BODY = re.compile(r"(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z)", re.DOTALL)
_CALL_END = re.compile(r"\s*(?:<\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z)")
_REST = re.compile(r"<\|call\|>|<\|end\|>|<\|return\|>")
_EXAMPLE = "<|channel|>commentary to=functions.TOOL <|constrain|>json<|message|>{…}<|call|>"


class Harmony:
    """A ToolFormat."""

    name = "harmony"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while header := turn.seek_call():
            if header["channel"] is None:
                turn.add_problem(f"a message has a head that is cut off or in no known form: write {_EXAMPLE}")
                turn.skip_to(_REST)
            elif to := header["to"] or (_TO.search(header["more"]) or ("", ""))[1]:
                self._read_call(turn, to)
            else:
                body = turn.expect(_BODY, "a message")[1]
                turn.add_reasoning(body) if header["channel"] == "analysis" else turn.add_content(body)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        """ValueError where the tool's name is none that can be told from the rest."""
        if not re.fullmatch(r"[^\s<>]+", call.name):
            raise ValueError(
                f"the format harmony cannot write the tool's name {call.name!r}: it must have no space, no < and no >"
            )
        head = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        return f"{head}{write_json(call.arguments)}<|call|>"

    def _read_call(self, turn: TurnReader, to: str) -> None:
        name = to.removeprefix("functions.")
        try:
            arguments = turn.read_object()
            turn.expect(_CALL_END, "<|call|>")
            turn.add(ToolCall(name, arguments))
        except Malformed as error:
            turn.add_problem(f"the message to {to} {error}: write {_EXAMPLE}")
            turn.skip_to(_REST)
