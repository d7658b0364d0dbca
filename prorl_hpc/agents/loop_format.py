"""How a loop talks with a model: how its turns are read, and how outputs come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prorl_hpc.agents.tool_formats.text import cut_middle
from prorl_hpc.agents.turns import ParsedTurn, ToolFormat
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.protocol import Turn


class LoopFormat(Protocol):
    """Implementations: NativeFormat, and tool_formats.text.TextFormat for small models."""

    def told(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        """Those of the loop's tools that the first prompt is to tell of."""
        ...

    def read(self, turn: Turn, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """Calls, or an answer (``content``), or a problem."""
        ...

    def observation(self, call: ToolCall, result: ToolResult) -> Message:
        """The message that carries a tool's output."""
        ...

    def refusal(self, call: ToolCall, problem: str) -> Message:
        """The message that tells why ``call`` did not run."""
        ...

    def correction(self, problem: str) -> Message:
        """The message that tells what was wrong with a turn without a readable call."""
        ...


@dataclass(frozen=True)
class NativeFormat:
    """Calls in the model's own format; outputs are messages of the role ``tool``, which ChatFormat writes as the template
    can."""

    format: ToolFormat
    limit_chars: int = 1000
    """Longer output is cut in the middle."""

    def told(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        return tools

    def read(self, turn: Turn, tools: Sequence[ToolSchema]) -> ParsedTurn:
        return self.format.parse(turn.raw, tools)

    def observation(self, call: ToolCall, result: ToolResult) -> Message:
        output = cut_middle(result.output.strip(), self.limit_chars)
        notes = [f"(no end within {result.seconds:.0f} s: it was ended)"] if result.timed_out else []
        notes += [f"(exit code {result.exit_code})"] if result.exit_code else []
        text = "\n".join([*([output] if output else []), *notes]) or "(no output)"
        return Message("tool", text, call.name, call.call_id)

    def refusal(self, call: ToolCall, problem: str) -> Message:
        return Message("tool", f"error: {problem}", call.name, call.call_id)

    def correction(self, problem: str) -> Message:
        return Message("user", f"error: {problem}")
