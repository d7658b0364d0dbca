"""Multi-turn rollouts without sandbox: the policy writes, texts as long as a tool's output come between, and every request
is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.protocol import LLM

T = TypeVar("T")
SYSTEM = "You work in a shell. Answer briefly."
_WORDS = [
    "alpha",
    "report",
    "Müller",
    "data",
    "naïve",
    "main.py",
    "北京",
    "result",
    "test",
    "0x7f",
    "build",
    "copy",
    "tmp/log",
    "draft",
    "€20",
    "old",
    "new",
]


@dataclass(frozen=True)
class Call:
    """One request to the engine, as it went out and as it was answered."""

    prompt: list[int]
    completion: Completion


@dataclass
class RecordingLLM:
    """An LLM that keeps all calls."""

    llm: LLM
    calls: list[Call] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        sent = list(token_ids)
        completion = await self.llm.generate(token_ids, sampling)
        self.calls.append(Call(sent, completion))
        return completion


def listing(name: str, lines: int) -> str:
    """Text like that of a directory's listing: the same for the same ``name``, another for every other."""
    source = random.Random(name)
    return "\n".join(
        f"{source.choice('d-')}rw-r--r-- {source.randrange(1, 10**6)} {source.choice(_WORDS)}  {source.choice(_WORDS)}"
        for _ in range(lines)
    )


async def play(conversation: TokenConversation, name: str, turns: int, lines: int) -> None:
    """So many turns, fewer if the context is full. Each is answered with a listing of its own of so many lines."""
    conversation.append([Message("system", SYSTEM), Message("user", f"What is in {name}?\n{listing(name, lines)}")])
    for turn in range(turns):
        before = conversation.num_tokens
        await conversation.generate()
        if conversation.num_tokens == before:
            return
        if turn + 1 < turns:
            conversation.append([Message("user", f"Output:\n{listing(f'{name}/{turn}', lines)}")])


async def at_once(rollouts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them; the first error ends the others, and is raised as it is."""
    tasks = [asyncio.create_task(rollout) for rollout in rollouts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
