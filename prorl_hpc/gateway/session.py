"""One rollout at the gateway: its calls, put together to conversations of token ids.

Invariants: an answer's ids are in exactly one conversation, in which they are trained; what a client sends back is
matched with what was generated, never tokenized again; once a session is over, no call reaches the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import PromptTooLong
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.core.call_assembly import Place, Thread, answer_keys, find_place, message_key, tools_key
from prorl_hpc.gateway.answers import read_turn
from prorl_hpc.gateway.calls import Answer, ModelCall, Refusal, Trouble, invalid
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.trajectory import Finish, Message
from prorl_hpc.tasks.protocol import Conversation, RolloutContext

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Strand:
    """A conversation and what its calls have shown of it."""

    conversation: Conversation
    thread: Thread


class Session:
    """Made by Gateway.open_session. ``key`` authorizes an agent's calls. ``calls`` counts those that the
    model was asked.
    ``last_text`` is the last text that the model wrote, in whichever conversation: after an agent has compacted its
    history, that is not the main one. ``failure`` is set when the LLM server broke: the rollout cannot go on.
    ``refused``: why the last call that was not put to the model was refused."""

    def __init__(
        self,
        context: RolloutContext,
        chat: ChatFormat,
        tool_format: ToolFormat,
        max_calls: int,
        max_context_tokens: int,
        registry: dict[str, Session],
    ) -> None:
        """``registry``: where it is to be found by its key until it is closed."""
        self.key = secrets.token_urlsafe(32)
        self.chat = chat
        self.responses: dict[str, list[Message]] = {}
        """Conversations by the id of the response that ends them, for APIs that do not send all of it again."""
        self.calls = 0
        self.last_text = ""
        self.failure: InferenceError | None = None
        self.refused = ""
        self.policy = context.spec.policy
        self._context = context
        self._registry = registry
        self._format = tool_format
        self._max_calls = max_calls
        self._asked = 0
        self._max_context_tokens = max_context_tokens
        self._strands: list[_Strand] = []
        self._running: set[asyncio.Task[Answer]] = set()
        self._over = asyncio.Event()
        self._why_over = ""

    @property
    def over(self) -> bool:
        """Every further call is refused."""
        return self._over.is_set()

    async def wait_over(self) -> None:
        """Until the session is over: calls or tokens used up, the LLM server broken, or closed."""
        await self._over.wait()

    def start(self, call: ModelCall) -> asyncio.Task[Answer]:
        """Put the call into its conversation and generate; cancelling the task aborts it in the engine. Raises Refusal at
        once, or from the task."""
        if self.over:
            raise Refusal(Trouble.OVER, self._why_over)
        # Those that are refused below count too, or an agent could repeat them for ever.
        self._asked += 1
        if self._asked > self._max_calls:
            self._context.require_conversation().end(Finish.TURNS)
            raise self._end(f"this rollout's {self._max_calls} calls to the model are used up (agent.max_calls)")
        try:
            strand = self._place(call)
        except Refusal as refusal:
            self.refused = str(refusal.__cause__ or refusal)
            raise
        self.calls += 1
        task = asyncio.create_task(self._generate(strand, call))
        self._running.add(task)

        def ended(_: asyncio.Task[Answer]) -> None:
            # Not in the task, which may be cancelled before it begins.
            strand.thread.busy = False
            self._running.discard(task)

        task.add_done_callback(ended)
        return task

    def count_tokens(self, call: ModelCall) -> int:
        """Tokens of the prompt that the call would begin a conversation with. Raises Refusal."""
        try:
            return len(self.chat.first_prompt(call.messages, call.tools))
        except (ValueError, ConfigError) as error:
            raise invalid("messages", str(error)) from error

    async def close(self) -> None:
        """No call reaches it any more; what runs is cancelled, and has ended on return. Conversations of which nobody has said
        how they ended were ended by the agent."""
        self._registry.pop(self.key, None)
        self._why_over = self._why_over or "this rollout has ended"
        self._over.set()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for strand in self._strands:
            if strand.conversation.finish is Finish.UNKNOWN:
                strand.conversation.end(Finish.ENVIRONMENT)

    # conversations

    def _place(self, call: ModelCall) -> _Strand:
        """Append the call's new messages where they belong. Without an await: calls in parallel see one another."""
        keys, tools = [message_key(message) for message in call.messages], tools_key(call.tools)
        place = find_place(keys, tools, [strand.thread for strand in self._strands])
        try:
            strand = self._enter(place, call, tools)
        except Refusal as refusal:
            if refusal.kind is not Trouble.INVALID or not place.kept:
                raise
            # The chat template does not go on so; perhaps it can be told all of it.
            place = Place()
            strand = self._enter(place, call, tools)
        strand.thread.ask(keys[place.kept :])
        if strand not in self._strands:
            self._strands.append(strand)
        return strand

    def _enter(self, place: Place, call: ModelCall, tools: str) -> _Strand:
        strand = self._open(place, tools)
        if place.kept < len(call.messages):
            self._append(strand.conversation, call, place.kept)
        return strand

    def _open(self, place: Place, tools: str) -> _Strand:
        found = next((strand for strand in self._strands if strand.thread is place.thread), None)
        if found is None:
            main = self._context.require_conversation()
            fresh = all(strand.conversation is not main for strand in self._strands)
            return _Strand(main if fresh else self._context.new_conversation(), Thread(tools))
        # One that is full has ended: what is shorter goes on beside it.
        if not place.fork and found.conversation.finish is not Finish.CONTEXT:
            return found
        branch = found.conversation.fork(place.kept)
        self._context.branches.append(branch)
        return _Strand(branch, found.thread.fork(place.kept))

    def _append(self, conversation: Conversation, call: ModelCall, kept: int) -> None:
        try:
            conversation.append(call.messages[kept:], () if kept else call.tools)
        except PromptTooLong as error:
            raise self._context_full() from error
        except (ValueError, ConfigError) as error:
            raise invalid("messages", str(error)) from error
        if conversation.finish is Finish.CONTEXT:
            raise self._context_full()

    def _context_full(self) -> Refusal:
        limit = f"{self._max_context_tokens} tokens" if self._max_context_tokens else "reached"
        message = f"This model's maximum context length is {limit}: prompt is too long. Shorten the conversation"
        return Refusal(Trouble.CONTEXT, message, "messages")

    # generation

    async def _generate(self, strand: _Strand, call: ModelCall) -> Answer:
        conversation, before = strand.conversation, strand.conversation.last_turn
        prompt_tokens = conversation.trajectory.num_tokens
        try:
            await conversation.generate(max_tokens=call.max_tokens, stop=call.stop)
        except InferenceError as error:
            self.failure = error
            raise self._end(f"the LLM server broke: {error}", Trouble.BROKEN) from error
        turn = conversation.last_turn
        if turn is None or turn is before:
            raise self._end("this rollout's generated tokens are used up (task.max_rollout_tokens)")
        answer = read_turn(turn, call, self._format, prompt_tokens)
        strand.thread.answer(answer_keys(answer.message))
        if answer.message.content.strip():
            self.last_text = answer.message.content
        if conversation.finish is Finish.STOP_STRING:
            self._end("the model wrote one of the run's stop strings (task.stop)")
        return answer

    def _end(self, why: str, kind: Trouble = Trouble.OVER) -> Refusal:
        """No further call reaches the engine."""
        self._why_over = why
        self._over.set()
        return Refusal(kind, why)
