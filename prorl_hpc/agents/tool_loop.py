"""The native agent loop: an assistant turn, a tool call, its output, and again until the answer.

A turn in the wrong form and a call of an unknown tool are the policy's mistakes: they come back to it as
readable text, and never raise. Only a broken sandbox or LLM server raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prorl_hpc.messages.trajectory import Message
from prorl_hpc.sandbox.protocol import Sandbox, ToolResult
from prorl_hpc.tasks.protocol import Conversation


@dataclass(frozen=True)
class ToolCall:
    """The model asks for a tool."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class FinalAnswer:
    """The model is done."""

    text: str


@dataclass(frozen=True)
class Malformed:
    """Neither; ``hint`` is what the model is told."""

    hint: str


class ToolFormat(Protocol):
    """How tool calls, answers and observations are written as text."""

    def parse(self, text: str) -> ToolCall | FinalAnswer | Malformed: ...

    def observation(self, result: ToolResult) -> Message:
        """The message that carries a tool's output."""
        ...

    def correction(self, hint: str) -> Message:
        """The message that tells the model what was wrong with its turn."""
        ...


@dataclass
class LoopOutcome:
    """How a loop ended. ``answer`` None: no final answer (turns used up, or truncated)."""

    answer: str | None = None
    turns: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    malformed: int = 0
    outputs: list[str] = field(default_factory=list)
    """What each tool call printed, as the model saw it."""

    def metrics(self) -> dict[str, float]:
        return {
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "failed_calls": self.failed_calls,
            "malformed": self.malformed,
            "answered": float(self.answer is not None),
        }


@dataclass(frozen=True)
class ToolLoop:
    """``tools``: the tools this task offers; a call of another one is refused without reaching the sandbox.
    ``stop_at_malformed``: end the rollout at a turn that is neither call nor answer, instead of a correction."""

    format: ToolFormat
    max_turns: int
    call_timeout_s: float = 20.0
    tools: frozenset[str] = frozenset({"bash"})
    stop_at_malformed: bool = False

    async def run(self, conversation: Conversation, sandbox: Sandbox, messages: Sequence[Message]) -> LoopOutcome:
        """Drive ``conversation`` from its first ``messages``; raises SandboxError, InferenceError."""
        outcome = LoopOutcome()
        conversation.append(messages)
        while True:
            text = await conversation.generate()
            outcome.turns += 1
            if conversation.truncated:
                return outcome
            step = self.format.parse(text)
            if isinstance(step, FinalAnswer):
                outcome.answer = step.text
                return outcome
            if isinstance(step, Malformed):
                outcome.malformed += 1
                if self.stop_at_malformed:
                    return outcome
            if outcome.turns >= self.max_turns:
                return outcome
            reply = (
                await self._call(step, sandbox, outcome)
                if isinstance(step, ToolCall)
                else self.format.correction(step.hint)
            )
            conversation.append([reply])
            if conversation.truncated:
                return outcome

    async def _call(self, call: ToolCall, sandbox: Sandbox, outcome: LoopOutcome) -> Message:
        outcome.tool_calls += 1
        if call.tool not in self.tools:
            outcome.failed_calls += 1
            return self.format.correction(f"there is no tool {call.tool!r}; tools: {', '.join(sorted(self.tools))}")
        result = await sandbox.call(call.tool, call.arguments, self.call_timeout_s)
        outcome.failed_calls += result.exit_code != 0
        observation = self.format.observation(result)
        outcome.outputs.append(observation.content)
        return observation
