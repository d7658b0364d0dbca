"""The native agent loop: an assistant turn, its tool calls, their outputs, and again until the answer.

A turn in the wrong form and a call of an unknown tool are the policy's mistakes: they come back to it as
readable text, and never raise. Only a broken sandbox or LLM server raises. Whatever ends the loop is noted in the
conversation (``finish``). Without tools it is plain chat: the first turn is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from prorl_hpc.agents.loop_format import LoopFormat
from prorl_hpc.agents.repetition import SameAgain, ends_in_repetition
from prorl_hpc.agents.tool_formats.reading import call_problems, call_text
from prorl_hpc.agents.tools import FINISH, Tool, make_tools
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import Finish, Message, ToolCall, ToolSchema
from prorl_hpc.sandbox.protocol import Sandbox
from prorl_hpc.tasks.protocol import Conversation


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
    ``stop_at_malformed``: end the rollout at a turn that is neither call nor answer, instead of a correction.
    ``max_repeats``: as task.max_repeats."""

    format: LoopFormat
    max_turns: int
    call_timeout_s: float = 20.0
    tools: Mapping[str, Tool] = field(default_factory=lambda: make_tools(["bash"]))
    stop_at_malformed: bool = False
    max_repeats: int = 0

    async def run(self, conversation: Conversation, sandbox: Sandbox, messages: Sequence[Message]) -> LoopOutcome:
        """Drive ``conversation`` from its first ``messages``; raises SandboxError, InferenceError."""
        outcome = LoopOutcome()
        schemas = [tool.schema for tool in self.tools.values()]
        again = SameAgain(self.max_repeats)
        conversation.append(messages, self.format.told(schemas))
        while True:
            parsed = await self._turn(conversation, schemas, outcome)
            if parsed is None:
                return outcome
            replies = await self._replies(parsed, schemas, sandbox, outcome)
            if outcome.answer is not None:
                conversation.end(Finish.ANSWER)
                return outcome
            done = [call_text(call) for call in parsed.calls] or [parsed.content]
            if again.add((done, [reply.content for reply in replies])):
                conversation.end(Finish.REPETITION)
                return outcome
            if outcome.turns >= self.max_turns:
                conversation.end(Finish.TURNS)
                return outcome
            conversation.append(replies)
            if conversation.truncated:
                return outcome

    async def _turn(
        self, conversation: Conversation, schemas: Sequence[ToolSchema], outcome: LoopOutcome
    ) -> ParsedTurn | None:
        """The next turn if it asks for replies; None if the loop ends with it."""
        before = conversation.last_turn
        await conversation.generate()
        turn = conversation.last_turn
        if turn is None or turn is before:
            return None  # nothing was left to generate with
        outcome.turns += 1
        if conversation.truncated or conversation.finish is Finish.STOP_STRING:
            return None
        if self.max_repeats and ends_in_repetition(turn.text, self.max_repeats):
            conversation.end(Finish.REPETITION)
            return None
        parsed = self.format.read(turn, schemas)
        if not parsed.calls and not parsed.problem:
            outcome.answer = parsed.content
            conversation.end(Finish.ANSWER)
            return None
        if parsed.unreadable:
            outcome.malformed += 1
            if self.stop_at_malformed:
                conversation.end(Finish.MALFORMED)
                return None
        answers = any(call.name == FINISH for call in parsed.calls)
        if outcome.turns >= self.max_turns and not answers:
            conversation.end(Finish.TURNS)
            return None
        return parsed

    async def _replies(
        self, parsed: ParsedTurn, schemas: Sequence[ToolSchema], sandbox: Sandbox, outcome: LoopOutcome
    ) -> list[Message]:
        """One message a call, up to one that gives the answer; what could not be read is told with the last."""
        replies: list[Message] = []
        problems = call_problems(parsed.calls, schemas)
        for number, call in enumerate(parsed.calls):
            outcome.tool_calls += 1
            if problem := problems.get(number):
                outcome.failed_calls += 1
                replies.append(self.format.refusal(call, problem))
                continue
            if call.name == FINISH:
                outcome.answer = call.arguments["answer"]
                return replies
            replies.append(await self._call(call, sandbox, outcome))
        if parsed.unreadable:
            correction = self.format.correction(parsed.unreadable)
            if replies:
                replies[-1] = replace(replies[-1], content=f"{replies[-1].content}\n{correction.content}")
            else:
                replies.append(correction)
        return replies

    async def _call(self, call: ToolCall, sandbox: Sandbox, outcome: LoopOutcome) -> Message:
        arguments: dict[str, Any] = call.arguments
        result = await self.tools[call.name].call(arguments, sandbox, self.call_timeout_s)
        outcome.failed_calls += result.exit_code != 0
        observation = self.format.observation(call, result)
        outcome.outputs.append(observation.content)
        return observation
