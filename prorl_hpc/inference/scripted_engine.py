"""An engine without a model: scripted replies, logprobs by formula. For tests and for runs that measure all the rest."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from prorl_hpc.config.script_settings import ScriptSettings
from prorl_hpc.inference.model_identity import ModelIdentity, identify_model
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.prefix_cache import PrefixCache
from prorl_hpc.inference.protocol import EngineLoad, ServerDown
from prorl_hpc.inference.script import DEFAULTS, Latency, Reply, pseudo_random_reply, replaying
from prorl_hpc.inference.stop_text import StopText
from prorl_hpc.inference.version_spans import spans_of
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams

_SLICE_S, _LONGEST_SLICE_S, _SLICE_SHARE = 0.005, 0.25, 0.02
"""Tokens that take less are made several at once: a thousand requests need no thousand wake-ups a token. The longer a
request has run, the longer its slices: this share of its time."""


def scripted_logprob(previous: int, token: int, version: int) -> float:
    """The logprob of ``token`` after ``previous`` under weights ``version``: arbitrary, but the same everywhere."""
    return -(zlib.crc32(f"{previous} {token} {version}".encode()) % 4000) / 1000


def scripted_scores(token_ids: Sequence[int], version: int) -> list[float]:
    """What ``score`` answers: logprobs of tokens 1..n-1."""
    return [scripted_logprob(a, b, version) for a, b in pairwise(token_ids)]


@dataclass
class _Running:
    """A request whose pauses end when it is aborted."""

    aborted: bool = False
    _pause: asyncio.Future[None] | None = None

    def abort(self) -> None:
        self.aborted = True
        self._wake()

    def _wake(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def pause(self, seconds: float) -> None:
        if seconds <= 0 or self.aborted:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._pause
        finally:
            timer.cancel()


class ScriptedEngine:
    """See Engine. ``reply`` is a function of prompt and sampling, or a mapping from prompts to replies; how long a request
    takes, ``settings`` say. Stop strings need the tokenizer of ``model_path``."""

    description = "scripted"

    def __init__(
        self,
        reply: Reply | Mapping[tuple[int, ...], Sequence[int]] = pseudo_random_reply,
        settings: ScriptSettings = DEFAULTS,
        model_path: Path | None = None,
        *,
        token_s: float = 0.0,
    ) -> None:
        self._reply = reply if callable(reply) else replaying(reply)
        self._settings = replace(settings, token_s=token_s) if token_s else settings
        self._text = ModelText(model_path) if model_path is not None else None
        self._model_path = model_path
        self._cache = PrefixCache(settings.cache_tokens, settings.block_size)
        self._running: dict[str, _Running] = {}
        self._read_tokens = 0
        """Prompt tokens that were not cached, since the start."""
        self._broken = asyncio.Event()
        self._last_words = ""
        self._prompt_tokens = self._generated_tokens = 0
        self.model = ModelIdentity()
        self.weight_version = 0
        self.stopped = False

    def break_down(self, last_words: str) -> None:
        """Behave from now on like an engine that died beyond repair."""
        self._last_words = last_words
        self._broken.set()

    async def start(self, progress: Callable[[str], None]) -> None:
        progress("reading the script")
        if self._model_path is not None:
            self.model = identify_model(self._model_path)

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, priority: int
    ) -> Completion:
        self._check_alive()
        reply = iter(self._reply(token_ids, sampling))
        stop_text = StopText(self._decode, sampling.stop)
        request = self._running[request_id] = _Running()
        cached, generation = self._cache.cached_tokens(token_ids), self._cache.generation
        self._prompt_tokens += len(token_ids)
        out: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: FinishReason | None = None
        try:
            async for some in self._paced(request, reply, Latency(self._settings, token_ids, sampling), cached):
                if request.aborted:
                    reason = FinishReason.ABORT
                    break
                for token in some:
                    if len(out) == sampling.max_tokens:
                        reason = FinishReason.LENGTH
                        break
                    logprobs.append(scripted_logprob((out or token_ids)[-1], token, self.weight_version))
                    versions.append(self.weight_version)
                    out.append(token)
                    self._generated_tokens += 1
                    if token in sampling.stop_token_ids or stop_text.ends(out):
                        reason = FinishReason.STOP
                        break
                if reason is not None:
                    break
            self._cache.keep([*token_ids, *out], generation)
        finally:
            del self._running[request_id]
        return Completion(out, logprobs, reason or FinishReason.STOP, spans_of(versions), cached)

    async def _paced(
        self, request: _Running, reply: Iterator[int], latency: Latency, cached: int
    ) -> AsyncIterator[list[int]]:
        """The reply's tokens, as many as a slice of time brings, when they are due; or nothing, if it was aborted."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self._read_tokens += latency.prompt_tokens - cached
        read_tokens = self._read_tokens
        await request.pause(latency.first_token_s(len(self._running) - 1, cached))
        while True:
            token_s = latency.token_s(len(self._running) - 1)
            slice_s = min(_LONGEST_SLICE_S, max(_SLICE_S, _SLICE_SHARE * (clock() - began)))
            some = [] if request.aborted else list(islice(reply, max(1, int(slice_s / token_s)) if token_s else 1))
            held_up_s = latency.held_up_s(self._read_tokens - read_tokens)
            read_tokens = self._read_tokens
            await request.pause(token_s * len(some) + held_up_s)
            self._check_alive()
            if not some and not request.aborted:
                return
            yield some

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._text is None:
            raise InferenceError("a scripted engine finds no stop strings without a model's tokenizer (model.path)")
        return self._text.decode(token_ids)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].abort()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._check_alive()
        return scripted_scores(token_ids, self.weight_version)

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        self.weight_version = update.version
        self._cache.forget()

    async def load(self) -> EngineLoad:
        self._check_alive()
        return EngineLoad(len(self._running), 0, self._prompt_tokens, self._generated_tokens)

    async def wait_broken(self) -> str:
        await self._broken.wait()
        return self._last_words

    async def stop(self) -> None:
        self.stopped = True
        self.break_down("it was stopped")

    def _check_alive(self) -> None:
        if self._broken.is_set():
            raise ServerDown(f"the scripted engine is down: {self._last_words}")
