"""From a generated turn to the message that a client gets."""

from __future__ import annotations

import logging
import uuid

from msgspec.structs import replace

from prorl_hpc.agents.tool_formats.reading import carriable_problem
from prorl_hpc.agents.turns import ParsedTurn, ToolFormat
from prorl_hpc.gateway.calls import Answer, AnswerEnd, ModelCall
from prorl_hpc.messages.inference import FinishReason
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.protocol import Turn

log = logging.getLogger(__name__)


def read_turn(turn: Turn, call: ModelCall, tool_format: ToolFormat, prompt_tokens: int) -> Answer:
    """Calls that cannot be read, and those that the client did not want, come as the text that they are."""
    parsed = _parsed(turn, call, tool_format)
    calls = [replace(made, call_id=made.call_id or f"call_{uuid.uuid4().hex[:24]}") for made in parsed.calls]
    if not (call.may_call and call.tools):
        calls = []
    text = parsed.content if calls or not (parsed.calls or parsed.problem) else _spoken(turn, parsed)
    text, reached = _cut(text, call.stop)
    message = Message("assistant", text, tool_calls=calls, reasoning=parsed.reasoning)
    return Answer(message, _end(turn, bool(calls), reached), turn, prompt_tokens, reached)


def _parsed(turn: Turn, call: ModelCall, tool_format: ToolFormat) -> ParsedTurn:
    try:
        parsed = tool_format.parse(turn.raw, call.tools)
        problem = carriable_problem([[made.name, made.arguments, made.call_id] for made in parsed.calls])
    except Exception as error:  # a format of the user's own; the turn is in its conversation, and must be answered
        log.exception("%s could not read a turn", getattr(tool_format, "name", "the tool format"))
        problem = str(error) or type(error).__name__
    return ParsedTurn("", "", (), problem) if problem else parsed


def _end(turn: Turn, calls: bool, reached: str) -> AnswerEnd:
    if turn.finish_reason is FinishReason.LENGTH:
        return AnswerEnd.LENGTH
    if calls:
        return AnswerEnd.CALLS
    return AnswerEnd.STOP_SEQUENCE if reached else AnswerEnd.DONE


def _spoken(turn: Turn, parsed: ParsedTurn) -> str:
    """All of the turn but the thought."""
    thought = parsed.reasoning.strip()
    at = turn.raw.find(thought) if thought else -1
    if at < 0:
        return turn.raw
    rest = turn.raw[at + len(thought) :].lstrip()
    end = rest.find(">") + 1
    return rest[end:].lstrip() if rest.startswith("</") and end else rest


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """The text before the first of the client's stop sequences, as these APIs have it, and that sequence."""
    found = [(text.index(sequence), sequence) for sequence in stop if sequence in text]
    if not found:
        return text, ""
    at, sequence = min(found)
    return text[:at], sequence
