"""A chat as token ids that only grow: the prompt, then exactly what the engine returned, turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import CUT, Finish, Message, Segment, ToolSchema, Trajectory
from prorl_hpc.tasks.protocol import LLM, Turn


class PromptTooLong(ValueError):
    """The first prompt leaves no room to answer."""


@dataclass
class Spent:
    """What the policy has generated in all conversations of a rollout, in tokens."""

    tokens: int = 0


class TokenConversation:
    """Implements tasks.protocol.Conversation over a ChatFormat and an LLM.

    Invariants: ``token_ids`` is only ever appended to; a token is trained exactly if the engine generated it in this
    conversation and not in one that it was forked from. The whole never exceeds ``max_context_tokens``: a message or turn
    that does not fit ends the conversation with Finish.CONTEXT.
    """

    def __init__(
        self,
        chat: ChatFormat,
        llm: LLM,
        sampling: SamplingParams,
        *,
        max_context_tokens: int,
        max_turn_tokens: int,
        max_rollout_tokens: int = 0,
        seed_scope: str = "",
        spent: Spent | None = None,
    ) -> None:
        """A turn is bounded by ``max_turn_tokens`` and ``sampling.max_tokens``, all turns by ``max_rollout_tokens`` (0:
        not). ``seed_scope`` makes equal seeds of different samples draw differently (row and sample number).
        ``spent``: that of the rollout's other conversations, which the last of these bounds too."""
        self._chat = chat
        self._llm = llm
        self._sampling = sampling
        self._max_context_tokens = max_context_tokens
        self._max_turn_tokens = max_turn_tokens
        self._max_rollout_tokens = max_rollout_tokens
        self._seed_scope = seed_scope
        self._segments: list[Segment] = []
        self._messages: list[Message] = []
        self._marks: dict[int, int] = {}
        """After so many messages there were so many segments: where this may be forked."""
        self._num_tokens = 0
        self._spent = spent or Spent()
        self._last_id: int | None = None
        self._turns = self._forks = 0
        self._assistant_turn_open = False
        self._full = False
        self._finish = Finish.UNKNOWN
        self._last_turn: Turn | None = None

    @property
    def tool_format(self) -> str:
        return self._chat.tool_format

    @property
    def finish(self) -> Finish:
        return self._finish

    @property
    def truncated(self) -> bool:
        return self._finish in CUT

    @property
    def last_turn(self) -> Turn | None:
        return self._last_turn

    @property
    def num_messages(self) -> int:
        return len(self._messages)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def trajectory(self) -> Trajectory:
        """A snapshot; valid after any failure."""
        return Trajectory(list(self._segments), list(self._messages), self.truncated, self._finish)

    def end(self, finish: Finish) -> None:
        """See the protocol."""
        if not self.truncated:
            self._finish = finish

    def tokenize(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """The ids that ``append`` would add; changes nothing, so that a thread may do it."""
        if self._segments:
            return self._chat.extension(messages, self._last_id)
        return self._chat.first_prompt(messages, tools)

    def has_room_for(self, ids: Sequence[int]) -> bool:
        """Whether a turn may still follow after them."""
        return self._num_tokens + len(ids) < self._max_context_tokens

    def append(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, ids: list[int] | None = None
    ) -> None:
        """See the protocol. ``ids``: what ``tokenize`` gave. Raises ValueError if the assistant's turn is already open,
        PromptTooLong if the first prompt leaves no room to answer."""
        if self._assistant_turn_open:
            raise ValueError("append before generate: the assistant's turn is already open")
        first = not self._segments
        ids = self.tokenize(messages, tools) if ids is None else ids
        if not self.has_room_for(ids):
            if first:
                raise PromptTooLong(
                    f"the first prompt has {len(ids)} tokens, model.max_context_tokens={self._max_context_tokens} "
                    "leaves no room for an answer: raise it or shorten the prompt"
                )
            # The next turn cannot fit, so nothing more is written: what is there stays trainable.
            self._full = True
            self._finish = Finish.CONTEXT
            return
        self._add(Segment(ids))
        self._messages.extend(messages)
        self._assistant_turn_open = True
        self._mark()

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """See the protocol. Returns "" without a call if the context or the rollout's tokens are used up. Raises
        InferenceError, also when the answer lacks ids, logprobs or weight versions, or is not of the length that it says."""
        if self._full:
            return ""
        if not self._assistant_turn_open:
            raise ValueError("generate before append: there is nothing to answer")
        bounds = self._bounds()
        own_limit = min(bounds.values())
        limit = own_limit if max_tokens is None else min(max_tokens, own_limit)
        if own_limit <= 0:
            self._full = True
            self._finish = Finish.ROLLOUT_TOKENS
            return ""
        sampling = msgspec.structs.replace(
            self._sampling,
            max_tokens=limit,
            seed=self._turn_seed(),
            stop_token_ids=sorted({*self._sampling.stop_token_ids, *self._chat.stop_token_ids}),
            stop=[*self._sampling.stop, *stop],
        )
        prompt = [token_id for segment in self._segments for token_id in segment.token_ids]
        completion = await self._llm.generate(prompt, sampling)
        check_completion(completion)
        generated = len(completion.token_ids)
        if generated > limit:
            raise InferenceError(f"the server generated {generated} tokens where at most {limit} were asked for")
        for span in completion.versions:
            part = slice(span.start, span.end)
            self._add(Segment(completion.token_ids[part], completion.logprobs[part], True, span.version))
        self._spent.tokens += generated
        turn = self._last_turn = self._turn_of(completion)
        self._messages.append(Message("assistant", turn.text))
        self._turns += 1
        self._assistant_turn_open = False
        self._mark()
        if completion.finish_reason is FinishReason.ABORT:
            raise InferenceError(f"the server aborted turn {self._turns} after {generated} tokens")
        self._finish = Finish.UNKNOWN
        if completion.finish_reason is FinishReason.LENGTH:
            if generated < limit:
                raise InferenceError(
                    f"the server cut turn {self._turns} after {generated} of {limit} tokens: its own limit is below "
                    "model.max_context_tokens"
                )
            # A turn that its caller wanted no longer is whole.
            if limit == own_limit:
                self._finish = next(finish for finish, bound in bounds.items() if bound == limit)
        elif any(text in turn.text for text in self._sampling.stop):
            self._finish = Finish.STOP_STRING
        return turn.text

    def fork(self, num_messages: int) -> TokenConversation:
        """See the protocol. ValueError if this conversation was never left after so many messages."""
        if num_messages not in self._marks:
            marks = ", ".join(map(str, self._marks)) or "none"
            raise ValueError(f"cannot fork after {num_messages} messages: turns end or begin after {marks}")
        self._forks += 1
        branch = TokenConversation(
            self._chat,
            self._llm,
            self._sampling,
            max_context_tokens=self._max_context_tokens,
            max_turn_tokens=self._max_turn_tokens,
            max_rollout_tokens=self._max_rollout_tokens,
            seed_scope=f"{self._seed_scope}/{num_messages}.{self._forks}",
            spent=self._spent,
        )
        for segment in self._segments[: self._marks[num_messages]]:
            branch._add(Segment(segment.token_ids))
        branch._messages = self._messages[:num_messages]
        branch._marks = {messages: segments for messages, segments in self._marks.items() if messages <= num_messages}
        branch._turns = sum(message.role == "assistant" for message in branch._messages)
        branch._assistant_turn_open = bool(branch._messages) and branch._messages[-1].role != "assistant"
        return branch

    def _bounds(self) -> dict[Finish, int]:
        """What a turn may have, and the finish of one that is cut there; the first of equal ones counts."""
        bounds = {Finish.CONTEXT: self._max_context_tokens - self._num_tokens}
        if self._max_rollout_tokens:
            bounds[Finish.ROLLOUT_TOKENS] = self._max_rollout_tokens - self._spent.tokens
        return bounds | {Finish.TURN_TOKENS: min(self._sampling.max_tokens, self._max_turn_tokens)}

    def _turn_of(self, completion: Completion) -> Turn:
        ids = completion.token_ids
        written = ids[:-1] if ids and ids[-1] in self._chat.stop_token_ids else ids
        raw = self._chat.decode(written, control_tokens=True)
        text = self._chat.decode(ids)
        return Turn(text, raw, list(ids), list(completion.logprobs), completion.finish_reason)

    def _turn_seed(self) -> int | None:
        if self._sampling.seed is None:
            return None
        text = f"{self._sampling.seed}\0{self._seed_scope}\0{self._turns}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1

    def _mark(self) -> None:
        self._marks[len(self._messages)] = len(self._segments)

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
