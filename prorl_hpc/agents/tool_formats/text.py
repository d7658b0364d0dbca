"""Ways for a small model to write a bash call as plain text: a whole turn is a tag or a fenced block, or the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.protocol import Turn

_ANSWER = re.compile(r"answer:\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True)
class TextFormat:
    """A whole turn, white space around it apart, is one bash call (``call``, group 1: the command) or the
    final answer (``answer``, group 1: its text). An agents.loop_format.LoopFormat; the prompt, which tells of bash, is the task's own."""

    call: re.Pattern[str]
    answer: re.Pattern[str] = _ANSWER
    example: str = "<bash>cat a.txt</bash>"
    """A call, shown to a model that wrote neither."""
    observation_prefix: str = ""
    limit_chars: int = 1000
    """Longer output is cut: in the middle with a mark, or at the end without one."""
    mark_cut: bool = True
    role: str = "user"

    def told(self, tools: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
        return ()

    def read(self, turn: Turn, tools: Sequence[ToolSchema]) -> ParsedTurn:
        return self.parse(turn.text)

    def parse(self, text: str) -> ParsedTurn:
        turn = text.strip()
        if (call := self.call.fullmatch(turn)) and call[1].strip():
            return ParsedTurn("", calls=(ToolCall("bash", {"command": call[1].strip()}),))
        if answer := self.answer.fullmatch(turn):
            return ParsedTurn(answer[1].strip())
        problem = f"write one command like {self.example}, or answer: and the answer"
        return ParsedTurn(turn, problem=problem, unreadable=problem)

    def observation(self, call: ToolCall, result: ToolResult) -> Message:
        output = result.output.strip()
        if result.timed_out:
            output = f"error: no end within {result.seconds:.0f} s\n{output}".strip()
        elif not output and result.exit_code:
            output = f"error: exit code {result.exit_code}"
        return self.observation_of(output)

    def observation_of(self, output: str) -> Message:
        """The message for this output, cut to the limit."""
        cut = cut_middle(output, self.limit_chars) if self.mark_cut else output[: self.limit_chars]
        return Message(self.role, f"{self.observation_prefix}{cut or '(empty)'}")

    def refusal(self, call: ToolCall, problem: str) -> Message:
        return self.correction(problem)

    def correction(self, problem: str) -> Message:
        return Message(self.role, f"error: {problem}")


def tag_format(limit_chars: int = 1000) -> TextFormat:
    """``<bash>cat x</bash>``"""
    return TextFormat(re.compile(r"<bash>((?:(?!</?bash>).)+)</bash>", re.DOTALL), limit_chars=limit_chars)


def fence_format(limit_chars: int = 1000) -> TextFormat:
    """A fenced block whose language is bash."""
    pattern = re.compile(r"```bash\n((?:(?!```).)+?)\n?```", re.DOTALL)
    return TextFormat(pattern, example="```bash\ncat a.txt\n```", limit_chars=limit_chars)


def cut_middle(text: str, limit_chars: int) -> str:
    """``text``, or its beginning and end with a mark between if it is longer than ``limit_chars``."""
    if len(text) <= limit_chars:
        return text
    head = limit_chars // 2
    return f"{text[:head]}\n[… {len(text) - limit_chars} characters cut …]\n{text[len(text) - (limit_chars - head) :]}"
