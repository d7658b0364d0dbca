"""A call to the model and its answer, in no API's words; and refusals, which each API words by itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from prorl_hpc.messages.trajectory import Message, ToolSchema
from prorl_hpc.tasks.protocol import Turn


@dataclass(frozen=True)
class ModelCall:
    """``messages``: the whole conversation. ``may_call``: False if the client wants no tool calls in the answer.
    ``max_tokens`` and ``stop`` narrow the run's own limits."""

    messages: list[Message]
    tools: list[ToolSchema] = field(default_factory=list)
    may_call: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class AnswerEnd(enum.Enum):
    """Why the model's turn ended."""

    DONE = enum.auto()
    CALLS = enum.auto()
    STOP_SEQUENCE = enum.auto()
    LENGTH = enum.auto()


@dataclass(frozen=True)
class Answer:
    """``message`` is what the client gets and is expected to send back. ``stop_sequence``: the one that was reached."""

    message: Message
    end: AnswerEnd
    turn: Turn
    prompt_tokens: int
    stop_sequence: str = ""

    @property
    def completion_tokens(self) -> int:
        return len(self.turn.token_ids)


class Trouble(enum.Enum):
    """Kinds of refusal; each API has its own status words for them."""

    INVALID = enum.auto()
    UNAUTHORIZED = enum.auto()
    NOT_FOUND = enum.auto()
    METHOD = enum.auto()
    TOO_LARGE = enum.auto()
    CONTEXT = enum.auto()
    """The conversation does not fit into the context."""
    OVER = enum.auto()
    """The rollout has used up its calls or tokens, or has ended."""
    BROKEN = enum.auto()
    """The LLM server broke; the rollout is given up."""


class Refusal(Exception):
    """``field``: the part of the request that is wrong, in the API's own name for it; empty if none is."""

    def __init__(self, kind: Trouble, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field


def invalid(field: str, message: str) -> Refusal:
    """400: ``message`` says what was given and what is allowed."""
    return Refusal(Trouble.INVALID, f"{field}: {message}", field)
