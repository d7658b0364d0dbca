"""What an assistant's turn says, and the ways in which models write tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prorl_hpc.messages.trajectory import ToolCall, ToolSchema


@dataclass(frozen=True)
class ParsedTurn:
    """``content``: the text outside of calls and thought. ``problem``: what is wrong with the turn's calls, in words for
    the model to read; empty if nothing is. ``calls``: all that could be read, also one of an unknown tool or with wrong
    arguments, and even if another one could not be read: ``unreadable`` is the part of ``problem`` about those."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    unreadable: str = ""


class ToolFormat(Protocol):
    """How one family of models writes calls. Implementations: agents.tool_formats; one contract suite."""

    name: str

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        """``raw`` is a turn as tasks.protocol.Turn.raw has it, perhaps cut. Never raises: what is malformed, cut, unknown or
        has arguments of the wrong type comes back as ``problem``. ``tools`` gives argument types, where the format writes
        all as text."""
        ...

    def write(self, call: ToolCall) -> str:
        """The call as this format has it, which ``parse`` reads again; for examples in prompts and for tests."""
        ...
