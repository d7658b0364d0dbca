"""Ways for a model to write a bash call as plain text: a tag, or a fenced block."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prorl_hpc.agents.tool_loop import FinalAnswer, Malformed, ToolCall
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.sandbox.protocol import ToolResult


@dataclass(frozen=True)
class TextFormat:
    """A turn is one bash call, which ``call`` matches (group 1: the command), or a line that begins with
    ``answer_prefix``; nothing else. ``example`` shows a call to a model that got it wrong."""

    call: re.Pattern[str]
    example: str
    answer_prefix: str = "answer:"
    observation_prefix: str = ""
    limit_chars: int = 1000
    """Longer output is cut in the middle, with a mark."""
    role: str = "user"

    def parse(self, text: str) -> ToolCall | FinalAnswer | Malformed:
        turn = text.strip()
        call = self.call.fullmatch(turn)
        if call is not None:
            return ToolCall("bash", {"command": call[1].strip()})
        if turn.startswith(self.answer_prefix):
            return FinalAnswer(turn[len(self.answer_prefix) :].strip())
        return Malformed(f"write one command like {self.example}, or {self.answer_prefix} and the answer")

    def observation(self, result: ToolResult) -> Message:
        output = cut_middle(result.output.strip(), self.limit_chars)
        if result.timed_out:
            output = f"{output}\nerror: timed out after {result.seconds:.0f} s".strip()
        elif not output:
            output = "(no output)" if result.exit_code == 0 else f"error: exit code {result.exit_code}"
        return Message(self.role, self.observation_prefix + output)

    def correction(self, hint: str) -> Message:
        return Message(self.role, f"error: {hint}")


def tag_format(limit_chars: int = 1000, observation_prefix: str = "") -> TextFormat:
    """``<bash>cat x</bash>``"""
    return TextFormat(
        re.compile(r"<bash>((?:(?!</?bash>).)+)</bash>", re.DOTALL),
        "<bash>cat a.txt</bash>",
        limit_chars=limit_chars,
        observation_prefix=observation_prefix,
    )


def fence_format(limit_chars: int = 1000, observation_prefix: str = "") -> TextFormat:
    """A fenced block whose language is bash."""
    return TextFormat(
        re.compile(r"```bash\n((?:(?!```).)+?)\n?```", re.DOTALL),
        "```bash\ncat a.txt\n```",
        limit_chars=limit_chars,
        observation_prefix=observation_prefix,
    )


def cut_middle(text: str, limit_chars: int) -> str:
    """``text``, or its beginning and end with a mark between if it is longer than ``limit_chars``."""
    if len(text) <= limit_chars:
        return text
    head = limit_chars // 2
    return f"{text[:head]}\n[… {len(text) - limit_chars} characters cut …]\n{text[len(text) - (limit_chars - head) :]}"
