"""A chat as token ids that only grow: the prompt, then exactly what the engine returned, turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory
from prorl_hpc.tasks.protocol import LLM


class TokenConversation:
    """Implements tasks.protocol.Conversation over a ChatFormat and an LLM.

    Invariants: ``token_ids`` is only ever appended to; a token is trained exactly if the engine generated it.
    The whole never exceeds ``max_context_tokens``: a message or turn that does not fit ends the
    conversation with ``truncated``.
    """

    def __init__(
        self,
        chat: ChatFormat,
        llm: LLM,
        sampling: SamplingParams,
        *,
        max_context_tokens: int,
        max_turn_tokens: int,
        seed_scope: str = "",
    ) -> None:
        """A turn is bounded by ``max_turn_tokens`` and ``sampling.max_tokens``. ``seed_scope`` makes equal
        seeds of different samples draw differently (row and sample number)."""
        self._chat = chat
        self._llm = llm
        self._sampling = sampling
        self._max_context_tokens = max_context_tokens
        self._max_turn_tokens = max_turn_tokens
        self._seed_scope = seed_scope
        self._segments: list[Segment] = []
        self._messages: list[Message] = []
        self._num_tokens = 0
        self._last_id: int | None = None
        self._turns = 0
        self._assistant_turn_open = False
        self._full = False
        self._truncated = False

    @property
    def truncated(self) -> bool:
        return self._truncated

    @property
    def trajectory(self) -> Trajectory:
        """A snapshot; valid after any failure."""
        return Trajectory(list(self._segments), list(self._messages), self._truncated)

    def append(self, messages: Sequence[Message]) -> None:
        """See the protocol. Raises ValueError if the assistant's turn is already open, or if the first prompt
        leaves no room to answer."""
        if self._assistant_turn_open:
            raise ValueError("append before generate: the assistant's turn is already open")
        first = not self._segments
        ids = self._chat.first_prompt(messages) if first else self._chat.extension(messages, self._last_id)
        if self._num_tokens + len(ids) >= self._max_context_tokens:
            if first:
                raise ValueError(
                    f"the first prompt has {len(ids)} tokens, model.max_context_tokens={self._max_context_tokens} "
                    "leaves no room for an answer: raise it or shorten the prompt"
                )
            # The next turn cannot fit, so nothing more is written: what is there stays trainable.
            self._full = self._truncated = True
            return
        self._add(Segment(ids))
        self._messages.extend(messages)
        self._assistant_turn_open = True

    async def generate(self) -> str:
        """See the protocol. Returns "" without a call if the context is full. Raises InferenceError, also when
        the answer lacks ids, logprobs or weight versions."""
        if self._full:
            return ""
        if not self._assistant_turn_open:
            raise ValueError("generate before append: there is nothing to answer")
        room = self._max_context_tokens - self._num_tokens
        sampling = msgspec.structs.replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, self._max_turn_tokens, room),
            seed=self._turn_seed(),
            stop_token_ids=sorted({*self._sampling.stop_token_ids, *self._chat.stop_token_ids}),
        )
        prompt = [token_id for segment in self._segments for token_id in segment.token_ids]
        completion = await self._llm.generate(prompt, sampling)
        check_completion(completion)
        for span in completion.versions:
            part = slice(span.start, span.end)
            self._add(Segment(completion.token_ids[part], completion.logprobs[part], True, span.version))
        text = self._chat.decode(completion.token_ids)
        self._messages.append(Message("assistant", text))
        self._turns += 1
        self._assistant_turn_open = False
        if completion.finish_reason is FinishReason.ABORT:
            raise InferenceError(f"the server aborted turn {self._turns} after {len(completion.token_ids)} tokens")
        if completion.finish_reason is FinishReason.LENGTH:
            self._truncated = True
        return text

    def _turn_seed(self) -> int | None:
        if self._sampling.seed is None:
            return None
        text = f"{self._sampling.seed}\0{self._seed_scope}\0{self._turns}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1

    def _add(self, segment: Segment) -> None:
        if segment.token_ids:
            self._segments.append(segment)
            self._num_tokens += len(segment.token_ids)
            self._last_id = segment.token_ids[-1]


def check_completion(completion: Completion) -> None:
    """Raise InferenceError unless every generated id has its logprob and its weight version."""
    n = len(completion.token_ids)
    if n == 0 and completion.finish_reason is not FinishReason.ABORT:
        raise InferenceError(f"the server answered no token ids (finish reason {completion.finish_reason})")
    if len(completion.logprobs) != n:
        raise InferenceError(f"the server answered {n} token ids but {len(completion.logprobs)} logprobs")
    at = 0
    for span in completion.versions:
        if span.start != at or span.end <= span.start:
            break
        at = span.end
    if at != n:
        spans = [(span.version, span.start, span.end) for span in completion.versions]
        raise InferenceError(f"the server's weight versions {spans} do not cover its {n} token ids in order")
