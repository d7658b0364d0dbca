"""What an agent saw and wrote, as token ids: the canonical form from the first prompt to the gradient.

Invariant: a generated id is never produced from text again. A trajectory's token sequence is the
concatenation of its segments; segments are only ever appended.
"""

from __future__ import annotations

import enum
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Of weights. Trajectories are stored with 32 bits for it, and for a token id."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Neither infinite nor NaN, which JSON does not have."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of tokens with one origin.

    ``logprobs`` holds one natural-log probability per token, as the engine reported them for the
    distribution it sampled from, and is present exactly when the policy generated the tokens
    (``trained``). ``weight_version`` is the version of the weights that generated them.
    """

    token_ids: list[TokenId]
    logprobs: list[Finite] | None = None
    trained: bool = False
    weight_version: Version | None = None

    def __post_init__(self) -> None:
        if self.trained and (self.logprobs is None or len(self.logprobs) != len(self.token_ids)):
            got = "none" if self.logprobs is None else str(len(self.logprobs))
            raise ValueError(f"a trained segment of {len(self.token_ids)} tokens needs as many logprobs, got {got}")


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model asks for tool ``name``. ``call_id`` pairs it with the answer, where the format has such ids."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: str = ""


class ToolSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as a model is told of it; ``parameters`` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def as_function(self) -> dict[str, Any]:
        """As chat templates and OpenAI's APIs have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn as text, for people to read and for a prompt's first writing; what a model generated is never tokenized
    again.

    ``role``: system, user, assistant or tool. ``name`` and ``call_id``: the tool that a tool's message answers for, and
    the call. ``tool_calls`` and ``reasoning`` are an assistant's."""

    role: str
    content: str
    name: str = ""
    call_id: str = ""
    tool_calls: list[ToolCall] = []
    reasoning: str = ""


class Finish(enum.StrEnum):
    """Why a rollout's conversation ended. Empty: nobody said."""

    UNKNOWN = ""
    ANSWER = "answer"
    """The policy said that it is done."""
    MALFORMED = "malformed"
    """A turn in no known form, where the task ends there."""
    TURNS = "turns"
    """``task.max_turns`` were used up."""
    TURN_TOKENS = "turn_tokens"
    """A turn was cut at ``task.max_turn_tokens``."""
    ROLLOUT_TOKENS = "rollout_tokens"
    """``task.max_rollout_tokens`` generated tokens were used up."""
    CONTEXT = "context"
    """``model.max_context_tokens`` leaves no room."""
    STOP_STRING = "stop_string"
    """A turn reached one of ``task.stop``."""
    REPETITION = "repetition"
    """A turn went round in circles, or the same calls were made again and again (``task.max_repeats``)."""
    ENVIRONMENT = "environment"
    """The environment or the outside agent ended the episode."""


CUT = frozenset({Finish.TURN_TOKENS, Finish.ROLLOUT_TOKENS, Finish.CONTEXT})
"""Ends at a token limit: what was being written is not whole."""


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Segments in order, and the same conversation as text."""

    segments: list[Segment] = []
    messages: list[Message] = []
    truncated: bool = False
    """True if a turn was cut at a token limit."""
    finish: Finish = Finish.UNKNOWN
    branches: list[Trajectory] = []
    """Further conversations of the same rollout, each a sample of its own with the rollout's reward: sub-agents, and
    what went on after an agent rewrote its history. What a branch shares with the conversation that it leaves is not
    trained in the branch. Branches have no branches."""

    @property
    def conversations(self) -> list[Trajectory]:
        """This one, then its branches: each a sample of its own in training."""
        return [self, *self.branches]

    @property
    def token_ids(self) -> list[int]:
        """All ids, length T."""
        return list(chain.from_iterable(s.token_ids for s in self.segments))

    @property
    def loss_mask(self) -> list[bool]:
        """True where the policy generated the token, length T."""
        return list(chain.from_iterable([s.trained] * len(s.token_ids) for s in self.segments))

    @property
    def logprobs(self) -> list[float]:
        """Engine logprobs, length T; 0.0 where ``loss_mask`` is false."""
        return list(
            chain.from_iterable(
                s.logprobs if s.trained and s.logprobs is not None else [0.0] * len(s.token_ids) for s in self.segments
            )
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_trained_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.trained)
