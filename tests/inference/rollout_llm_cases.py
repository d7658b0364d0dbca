"""One LLM server of each kind as a worker sees it, with what the contract needs to know about it."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_site import open_site
from engine_cases import open_case
from fake_vllm import CONTEXT, serve_outside

from prorl_hpc.inference.client import LLMClient
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.inference.vllm_settings import MODEL_NAME
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.keys import RunKeys


@dataclass
class LLMCase:
    """``in_flight``: requests that the server is generating for or holds. ``weight_version``: what it is known to
    serve. Its context is ``CONTEXT`` tokens. ``engine``: the one behind it, to compare with."""

    ref: ServerRef
    client: LLMClient
    in_flight: Callable[[], Awaitable[int]]
    weight_version: int
    engine: Engine | None = None


def _tokens(token_ids: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
    if len(token_ids) >= CONTEXT:
        raise InferenceError(f"the prompt has {len(token_ids)} tokens")
    for i in range(min(sampling.max_tokens, CONTEXT - len(token_ids))):
        yield zlib.crc32(f"{token_ids} {sampling.seed} {i}".encode()) % 256


class Servers:
    """Opens a server of each kind; the real vLLM, which takes long to start, is one for two kinds."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._keys = RunKeys.create(directory / "keys")
        self._vllm: Engine | None = None

    async def open(self, kind: str, tiny_model: Path, scratch: Path) -> LLMCase:
        match kind:
            case "zeromq":
                return await self._behind_an_agent(ScriptedEngine(_reply, token_s=0.001), kind)
            case "http":
                fake = await self._stack.enter_async_context(serve_outside(self._directory / "outside.sock"))

                async def in_flight() -> int:
                    return len(fake.in_flight)

                return LLMCase(self._outside(fake.url, "policy"), self._client(), in_flight, 7)
        if self._vllm is None:
            self._vllm = (await self._stack.enter_async_context(open_case("vllm", tiny_model, scratch))).engine
        if kind == "vllm-zeromq":
            return await self._behind_an_agent(self._vllm, kind)
        return self._before_vllm(self._vllm)

    def _before_vllm(self, engine: Engine) -> LLMCase:
        async def in_flight() -> int:
            load = await engine.load()
            return load.running + load.waiting

        url = f"unix:{engine._process.settings.socket}"  # type: ignore[attr-defined]
        return LLMCase(self._outside(url, MODEL_NAME), self._client(), in_flight, 7, engine)

    async def _behind_an_agent(self, engine: Engine, name: str) -> LLMCase:
        site = await self._stack.enter_async_context(
            open_site(self._directory, engine, slots=16, name=name, keys=self._keys)
        )

        async def in_flight() -> int:
            load = await engine.load()
            return site.requests() + load.running + load.waiting

        return LLMCase(site.ref, self._client(), in_flight, 0, engine)

    def _client(self) -> LLMClient:
        client = LLMClient("here", self._keys, "worker-0")
        self._stack.push_async_callback(client.close)
        return client

    def _outside(self, url: str, model: str) -> ServerRef:
        return ServerRef("outside", "elsewhere", "", "", url=url, model=model, weight_version=7)


def _reply(token_ids: Any, sampling: SamplingParams) -> Any:
    return _tokens(list(token_ids), sampling)
