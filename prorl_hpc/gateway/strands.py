"""The conversations of one rollout at the gateway, and where a call's messages go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.core.call_assembly import Place, Thread, find_place, message_key, tools_key
from prorl_hpc.gateway.calls import ModelCall, Refusal, Trouble, invalid
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Finish, Message, ToolSchema
from prorl_hpc.tasks.protocol import Conversation, RolloutContext

_SHORT_CHARS = 20_000
"""What is longer is tokenized beside the event loop, which it would hold up for longer than 10 ms."""
_BODY_BYTES_PER_TOKEN = 64
_MOST_BODY_BYTES = 32 * 2**20
_KEPT_CONTEXTS = 16
_tokenizing = ThreadPoolExecutor(2, "gateway-tokenizes")
"""Few, and of its own: a worker's other threads are not to wait for long prompts."""


@dataclass(frozen=True)
class Limits:
    """Of one rollout. ``calls_setting``: the setting that ``max_calls`` is. ``max_context_tokens`` 0: not known.
    ``max_tokens``: of all conversations together (agent.max_tokens); 0: 16 times ``max_context_tokens``."""

    max_calls: int
    calls_setting: str = "agent.max_calls"
    max_context_tokens: int = 0
    max_tokens: int = 0

    @property
    def max_body_bytes(self) -> int:
        """Of a request. Far more than what fits into the context, JSON and tools included."""
        if not self.max_context_tokens:
            return _MOST_BODY_BYTES
        return min(_MOST_BODY_BYTES, 2**16 + _BODY_BYTES_PER_TOKEN * self.max_context_tokens)

    @property
    def kept_tokens(self) -> int:
        """0: without a limit."""
        return self.max_tokens or _KEPT_CONTEXTS * self.max_context_tokens


@dataclass(eq=False)
class Strand:
    """A conversation and what its calls have shown of it. ``too_long``: its last call was refused for its length."""

    conversation: TokenConversation
    thread: Thread
    too_long: bool = False

    def rest(self) -> None:
        """It is not being answered any more."""
        self.thread.busy = False


class Strands:
    """Those in which something was asked. The first is the rollout's main conversation, the others are its branches."""

    def __init__(self, context: RolloutContext, limits: Limits) -> None:
        self._context = context
        self._limits = limits
        self._all: list[Strand] = []

    async def place(self, call: ModelCall, check: Callable[[], None]) -> Strand:
        """Append the call's new messages where they belong; not to be called again before it returns. ``check`` is
        called before anything is changed. Raises Refusal: OVER if the rollout's tokens are used up."""
        keys, tools = [message_key(message) for message in call.messages], tools_key(call.tools)
        place = find_place(keys, tools, [strand.thread for strand in self._all])
        try:
            strand = await self._enter(place, call, tools, check)
        except Refusal as refusal:
            if refusal.kind is not Trouble.INVALID or not place.kept:
                raise
            # The chat template does not go on so; perhaps it can be told all of it.
            place = Place()
            strand = await self._enter(place, call, tools, check)
        strand.thread.ask(keys[place.kept :])
        return strand

    def end(self, finish: Finish) -> None:
        """Of those of which nobody has said how they ended: one that was too long to go on, and has not, ended by that."""
        for strand in self._all:
            if strand.conversation.finish is Finish.UNKNOWN:
                strand.conversation.end(Finish.CONTEXT if strand.too_long else finish)

    async def _enter(self, place: Place, call: ModelCall, tools: str, check: Callable[[], None]) -> Strand:
        strand, told = self._open(place, tools), () if place.kept else call.tools
        conversation, new = strand.conversation, call.messages[place.kept :]
        try:
            ids = await tokenize(conversation.tokenize, new, told, self._limits) if new else []
            if new and not conversation.has_room_for(ids):
                raise context_full(self._limits, conversation.trajectory.num_tokens + len(ids))
        except Refusal as refusal:
            strand.too_long = strand.too_long or refusal.kind is Trouble.CONTEXT
            raise
        check()
        self._refuse_too_much(strand, ids)
        if new:
            conversation.append(new, told, ids=ids)
        strand.too_long = False
        if strand not in self._all:
            self._all.append(strand)
            if conversation is not self._context.require_conversation():
                self._context.branches.append(conversation)
        return strand

    def _open(self, place: Place, tools: str) -> Strand:
        """Where the call goes on; not yet one of the rollout's, if it is new."""
        found = next((strand for strand in self._all if strand.thread is place.thread), None)
        if found is not None:
            if not place.fork:
                return found
            return Strand(found.conversation.fork(place.kept), found.thread.fork(place.kept))
        main = self._context.require_conversation()
        if all(strand.conversation is not main for strand in self._all):
            return Strand(_of_tokens(main), Thread(tools))
        assert self._context.converse is not None, "RUN and later stages can open conversations"
        return Strand(_of_tokens(self._context.converse()), Thread(tools))

    def _refuse_too_much(self, strand: Strand, ids: Sequence[int]) -> None:
        limit = self._limits.kept_tokens
        kept = sum(known.conversation.num_tokens for known in self._all)
        more = len(ids) + (0 if strand in self._all else strand.conversation.num_tokens)
        if limit and kept + more > limit:
            raise Refusal(
                Trouble.OVER,
                f"this rollout's {len(self._all)} conversations have {kept} tokens and would have {kept + more}; at most "
                f"{limit} are kept in all (agent.max_tokens): agents that rewrite their history use up many",
            )


async def tokenize(
    write: Callable[[Sequence[Message], Sequence[ToolSchema]], list[int]],
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    limits: Limits,
) -> list[int]:
    """``write(messages, tools)``, in a thread if it is long; Refusal if that cannot be or would be far too long."""
    if limits.max_context_tokens and len(messages) > limits.max_context_tokens:
        raise context_full(limits)  # every message has a token
    texts = (message.content + message.reasoning + "".join(map(str, message.tool_calls)) for message in messages)
    chars = sum(map(len, texts)) + sum(len(str(tool)) for tool in tools)
    try:
        if chars <= _SHORT_CHARS and len(messages) <= _SHORT_CHARS // 100:
            return write(messages, tools)
        return await asyncio.get_running_loop().run_in_executor(_tokenizing, write, messages, tools)
    except (ValueError, ConfigError) as error:
        raise invalid("messages", str(error)) from error


def context_full(limits: Limits, tokens: int = 0) -> Refusal:
    """``tokens``: of the prompt, where they are known."""
    most = limits.max_context_tokens
    limit = f"{most} tokens (model.max_context_tokens={most})" if most else "reached"
    has = f", {tokens} tokens" if tokens else ""
    message = f"This model's maximum context length is {limit}: prompt is too long{has}. Shorten the conversation"
    return Refusal(Trouble.CONTEXT, message, "messages")


def _of_tokens(conversation: Conversation) -> TokenConversation:
    assert isinstance(conversation, TokenConversation), "what policies open"
    return conversation
