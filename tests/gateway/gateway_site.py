"""A gateway on its socket with a scripted model behind it, and raw HTTP clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import Spent, TokenConversation
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.gateway.server import Gateway
from prorl_hpc.gateway.session import Session
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema, Trajectory
from prorl_hpc.sandbox.protocol import Sandbox
from prorl_hpc.tasks.protocol import LLM, RolloutContext
from prorl_hpc.tasks.testing import ScriptedLLM

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


class CallTags:
    """``<think>…</think>`` and ``<call>{"name": …, "arguments": …}</call>``."""

    name = "call_tags"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        thought = _THOUGHT.match(raw)
        rest = raw[thought.end() :] if thought else raw
        calls, problem = [], ""
        for text in _CALL.findall(rest):
            try:
                made = json.loads(text)
                calls.append(ToolCall(made["name"], made["arguments"]))
            except (ValueError, KeyError) as error:
                problem = f"{text!r} is no call: {error}"
        content = _CALL.sub("", rest).strip() if "<call>" in rest else rest
        return ParsedTurn(content, thought[1].strip() if thought else "", tuple(calls), problem)

    def write(self, call: ToolCall) -> str:
        return f"<call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</call>"


class WaitingLLM:
    """Answers ``texts`` in turn, each when ``go`` is set; ``cancelled`` counts those that were given up before."""

    def __init__(self, chat: ChatFormat, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self._chat = chat
        self.go = asyncio.Event()
        self.waiting = self.cancelled = 0

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.waiting += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await ScriptedLLM(self._chat, [self.texts.pop(0)]).generate(token_ids, sampling)


@dataclass
class Site:
    """``http`` has the session's key."""

    gateway: Gateway
    session: Session
    context: RolloutContext
    chat: ChatFormat
    llm: Any
    http: aiohttp.ClientSession
    script: list[Any] = field(default_factory=list)

    @property
    def trajectory(self) -> Trajectory:
        found = self.context.trajectory
        assert found is not None
        return found

    def text(self, trajectory: Trajectory) -> str:
        return self.chat.decode(trajectory.token_ids, control_tokens=True)

    def trained(self, trajectory: Trajectory) -> list[str]:
        return [self.chat.decode(part.token_ids) for part in trajectory.segments if part.trained]

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """(event name, data) of each server-sent event."""
        async with self.http.post(path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            text = await answer.text()
        events = []
        for block in text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if lines:
                data = lines["data"]
                events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return events


def new_context(chat: ChatFormat, llm: LLM, **limits: int) -> RolloutContext:
    """A rollout that has come to RUN; ``limits`` are TokenConversation's."""
    bounds = {"max_context_tokens": 4096, "max_turn_tokens": 256, **limits}
    numbers, spent = itertools.count(), Spent()

    def converse() -> TokenConversation:
        return TokenConversation(chat, llm, SamplingParams(), seed_scope=str(next(numbers)), spent=spent, **bounds)

    no_sandbox = cast(Sandbox, None)  # the gateway never looks at it
    return RolloutContext(RolloutSpec("rollout-0", "task", {}), no_sandbox, converse(), converse=converse)


@asynccontextmanager
async def gateway_site(
    chat: ChatFormat,
    turns: Sequence[Any] | Callable[[str], Any] | LLM,
    *,
    max_calls: int = 100,
    max_tokens: int = 0,
    ping_s: float = 10.0,
    idle_s: float = 10.0,
    **limits: int,
) -> AsyncIterator[Site]:
    llm = turns if hasattr(turns, "generate") else ScriptedLLM(chat, cast(Any, turns))
    context = new_context(chat, cast(LLM, llm), **limits)
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "gateway.sock"
        gateway = Gateway(socket, ping_s=ping_s, idle_s=idle_s)
        await gateway.start()
        session = gateway.open_session(
            context,
            chat,
            max_calls=max_calls,
            tool_format=CallTags(),
            max_context_tokens=limits.get("max_context_tokens", 4096),
            max_tokens=max_tokens,
        )
        try:
            async with aiohttp.ClientSession(
                "http://gateway",
                connector=aiohttp.UnixConnector(str(socket)),
                headers={"Authorization": f"Bearer {session.key}"},
            ) as http:
                yield Site(gateway, session, context, chat, llm, http)
        finally:
            await gateway.close()
