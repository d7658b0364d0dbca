"""One rollout at the gateway: its calls, put together to conversations of token ids.

Invariants: an answer's ids are in exactly one conversation, in which they are trained; what a client sends back is
matched with what was generated, never tokenized again; once a session is over, no call reaches the engine; a refused call
changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.core.call_assembly import answer_keys
from prorl_hpc.gateway.answers import read_turn
from prorl_hpc.gateway.calls import Answer, ModelCall, Refusal, Trouble
from prorl_hpc.gateway.strands import Limits, Strand, Strands, tokenize
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.trajectory import Finish, Message
from prorl_hpc.tasks.protocol import RolloutContext

log = logging.getLogger(__name__)

_COUNTS_PER_CALL = 10
"""Counting tokens costs the worker as much as a prompt does; agents count before they call."""


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
        limits: Limits,
        registry: dict[str, Session],
    ) -> None:
        """``registry``: where it is to be found by its key until it is closed."""
        self.key = secrets.token_urlsafe(32)
        self.chat = chat
        self.limits = limits
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
        self._asked = self._counted = 0
        self._strands = Strands(context, limits)
        self._placing = asyncio.Lock()
        self._undelivered: list[tuple[ModelCall, Answer]] = []
        self._running: set[asyncio.Task[Answer]] = set()
        self._over = asyncio.Event()
        self._why_over = ""
        self._finish = Finish.UNKNOWN

    @property
    def over(self) -> bool:
        """Every further call is refused."""
        return self._over.is_set()

    async def wait_over(self) -> None:
        """Until the session is over: calls or tokens used up, the LLM server broken, or closed."""
        await self._over.wait()

    async def start(self, call: ModelCall) -> asyncio.Task[Answer]:
        """Put the call into its conversation and generate; cancelling the task aborts it in the engine. Raises Refusal at
        once, or from the task."""
        for known, answer in self._undelivered:
            if known == call:
                self._undelivered.remove((known, answer))
                return self._run(_given(answer))
        self._count_call()
        # One after the other: calls in parallel see one another.
        async with self._placing:
            self._refuse_if_over()
            try:
                strand = await self._strands.place(call, self._refuse_if_over)
            except Refusal as refusal:
                self.refused = str(refusal.__cause__ or refusal)
                if refusal.kind is Trouble.OVER and not self.over:
                    raise self._end(refusal.message, finish=Finish.ROLLOUT_TOKENS) from refusal
                raise
            self.calls += 1
            task = self._run(self._generate(strand, call))
            # Not in the task, which may be cancelled before it begins.
            task.add_done_callback(lambda _: strand.rest())
            return task

    def not_delivered(self, call: ModelCall, answer: Answer) -> None:
        """The client has not got it: the same call, made again, gets the same answer, which is trained once."""
        self._undelivered.append((call, answer))

    async def count_tokens(self, call: ModelCall) -> int:
        """Tokens of the prompt that the call would begin a conversation with. Raises Refusal."""
        self._refuse_if_over()
        self._counted += 1
        most = self.limits.max_calls * _COUNTS_PER_CALL
        if self._counted > most:
            setting = self.limits.calls_setting
            raise Refusal(
                Trouble.OVER,
                f"this rollout has counted tokens {most} times, {_COUNTS_PER_CALL} for each of its calls ({setting})",
            )
        async with self._placing:
            return len(await tokenize(self.chat.first_prompt, call.messages, call.tools, self.limits))

    async def close(self, finish: Finish = Finish.ENVIRONMENT) -> None:
        """No call reaches it any more; what runs is cancelled, and has ended on return. Conversations of which nobody has said
        how they ended get ``finish``; by default the agent ended them."""
        self._registry.pop(self.key, None)
        self._why_over = self._why_over or "this rollout has ended"
        self._over.set()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._finish is not Finish.UNKNOWN:
            self._context.require_conversation().end(self._finish)
        self._strands.end(finish)

    def _count_call(self) -> None:
        self._refuse_if_over()
        # Those that are refused later count too, or an agent could repeat them for ever.
        self._asked += 1
        if self._asked > self.limits.max_calls:
            used = (
                f"this rollout's {self.limits.max_calls} calls to the model are used up ({self.limits.calls_setting})"
            )
            raise self._end(used, finish=Finish.TURNS)

    def _refuse_if_over(self) -> None:
        if self.over:
            raise Refusal(Trouble.OVER, self._why_over)

    # generation

    def _run(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _generate(self, strand: Strand, call: ModelCall) -> Answer:
        conversation, before = strand.conversation, strand.conversation.last_turn
        prompt_tokens = conversation.num_tokens
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

    def _end(self, why: str, kind: Trouble = Trouble.OVER, *, finish: Finish = Finish.UNKNOWN) -> Refusal:
        """No further call reaches the engine. ``finish``: the main conversation's."""
        self._why_over = why
        self._over.set()
        if finish is not Finish.UNKNOWN:
            self._finish = finish
            self._context.require_conversation().end(finish)
        return Refusal(kind, why)


async def _given(answer: Answer) -> Answer:
    return answer
