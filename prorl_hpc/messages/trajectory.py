"""What an agent saw and wrote, as token ids: the canonical form from the first prompt to the gradient.

Invariant: a generated id is never produced from text again. A trajectory's token sequence is the
concatenation of its segments; segments are only ever appended.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated

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


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn as text, for people to read; never the source of token ids."""

    role: str
    content: str


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Segments in order, and the same conversation as text."""

    segments: list[Segment] = []
    messages: list[Message] = []
    truncated: bool = False
    """True if a turn was cut at a token limit (overlong filtering looks at this)."""

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
