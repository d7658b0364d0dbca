"""How a loop talks with a model: what it is told of tools, how its turns are read, and how outputs come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from prorl_hpc.agents.tool_formats.text import cut_middle
from prorl_hpc.agents.turns import ParsedTurn, ToolFormat
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.protocol import Turn

_EXAMPLE = ToolCall("bash", {"command": "ls -l"})


class Dialect(Protocol):
    """Implementations: NativeDialect, and tool_formats.text.TextFormat for small models."""

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[Message], Sequence[ToolSchema]]:
        """The first messages, and the tools that the chat template is to tell of."""
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
class NativeDialect:
    """Calls as the model's own template has them. ``in_prompt``: the template does not teach tools, so the system prompt
    tells of them and outputs come as the user's messages."""

    format: ToolFormat
    limit_chars: int = 1000
    in_prompt: bool = False

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[Message], Sequence[ToolSchema]]:
        if not tools or not self.in_prompt:
            return list(messages), tools
        taught = teaching(self.format, tools)
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=f"{messages[0].content}\n\n{taught}".strip())
            return [first, *messages[1:]], ()
        return [Message("system", taught), *messages], ()

    def read(self, turn: Turn, tools: Sequence[ToolSchema]) -> ParsedTurn:
        return self.format.parse(turn.raw, tools)

    def observation(self, call: ToolCall, result: ToolResult) -> Message:
        output = cut_middle(result.output.strip(), self.limit_chars)
        notes = [f"(no end within {result.seconds:.0f} s: it was ended)"] if result.timed_out else []
        notes += [f"(exit code {result.exit_code})"] if result.exit_code else []
        return self._answer(call, "\n".join([*([output] if output else []), *notes]) or "(no output)")

    def refusal(self, call: ToolCall, problem: str) -> Message:
        return self._answer(call, f"error: {problem}")

    def correction(self, problem: str) -> Message:
        return Message("user", f"error: {problem}")

    def _answer(self, call: ToolCall, text: str) -> Message:
        if self.in_prompt:
            return Message("user", text)
        return Message("tool", text, call.name, call.call_id)


def teaching(tool_format: ToolFormat, tools: Sequence[ToolSchema]) -> str:
    """What a model is told of ``tools`` where its template does not: each tool, and how a call is written."""
    described = "\n".join(json.dumps(tool.as_function()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools:\n{described}\n\nWrite a call like this, with the tool's own name and arguments:\n"
        f"{tool_format.write(_EXAMPLE)}\n\nThe output comes in the next message. A message without a call is your answer."
    )
