"""One LLM server of each kind as a worker sees it, with what the contract needs to know about it."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def open_llm(kind: str, tiny_model: Path, scratch: Path) -> AsyncIterator[LLMCase]:
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as name:
        opened = {"zeromq": _zeromq, "http": _http, "vllm": _vllm}[kind]
        async with opened(Path(name), tiny_model, scratch) as case:
            yield case
            await case.client.close()


@asynccontextmanager
async def _zeromq(directory: Path, tiny_model: Path, scratch: Path) -> AsyncIterator[LLMCase]:
    def reply(token_ids: Any, sampling: SamplingParams) -> Any:
        return _tokens(list(token_ids), sampling)

    async with open_site(directory, ScriptedEngine(reply, token_s=0.001), slots=16) as site:

        async def in_flight() -> int:
            return len(site.engine._running)

        yield LLMCase(site.ref, site.worker(), in_flight, 0, site.engine)


@asynccontextmanager
async def _http(directory: Path, tiny_model: Path, scratch: Path) -> AsyncIterator[LLMCase]:
    async with serve_outside(directory / "outside.sock") as fake:

        async def in_flight() -> int:
            return len(fake.in_flight)

        ref = ServerRef("outside", "elsewhere", "", "", url=fake.url, model="policy", weight_version=7)
        yield LLMCase(ref, LLMClient("here", RunKeys.create(directory / "keys"), "worker-0"), in_flight, 7)


@asynccontextmanager
async def _vllm(directory: Path, tiny_model: Path, scratch: Path) -> AsyncIterator[LLMCase]:
    async with open_case("vllm", tiny_model, scratch) as case:

        async def in_flight() -> int:
            load = await case.engine.load()
            return load.running + load.waiting

        url = f"unix:{case.engine._process.settings.socket}"  # type: ignore[attr-defined]
        ref = ServerRef("outside", "elsewhere", "", "", url=url, model=MODEL_NAME, weight_version=7)
        yield LLMCase(ref, LLMClient("here", RunKeys.create(directory / "keys"), "worker-0"), in_flight, 7, case.engine)
