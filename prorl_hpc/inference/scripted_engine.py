"""An engine without a model: scripted replies, logprobs by formula. For tests and for runs that measure all the rest."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from prorl_hpc.inference.protocol import EngineLoad, ServerDown
from prorl_hpc.inference.version_spans import spans_of
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams

Reply: TypeAlias = Callable[[Sequence[int], SamplingParams], Sequence[int]]

_VOCABULARY = 256


def scripted_logprob(previous: int, token: int, version: int) -> float:
    """The logprob of ``token`` after ``previous`` under weights ``version``: arbitrary, but the same everywhere."""
    return -(zlib.crc32(f"{previous} {token} {version}".encode()) % 4000) / 1000


def scripted_scores(token_ids: Sequence[int], version: int) -> list[float]:
    """What ``score`` answers: logprobs of tokens 1..n-1."""
    return [scripted_logprob(a, b, version) for a, b in pairwise(token_ids)]


def pseudo_random_reply(token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Ids that depend on prompt and seed alone, of any length up to ``max_tokens``, ended by a stop token if
    there is one."""
    source = random.Random(zlib.crc32(f"{list(token_ids)} {sampling.seed}".encode()))
    ids = [source.randrange(_VOCABULARY) for _ in range(source.randint(1, sampling.max_tokens))]
    return ids[:-1] + sampling.stop_token_ids[:1] if sampling.stop_token_ids else ids


class ScriptedEngine:
    """See Engine. ``reply`` is a function of prompt and sampling, or a mapping from prompts to replies; each
    token takes ``token_s`` seconds."""

    description = "scripted"

    def __init__(
        self,
        reply: Reply | Mapping[tuple[int, ...], Sequence[int]] = pseudo_random_reply,
        *,
        token_s: float = 0.0,
    ) -> None:
        self._reply = reply
        self._token_s = token_s
        self._running: dict[str, asyncio.Event] = {}
        self._broken = asyncio.Event()
        self._last_words = ""
        self._prompt_tokens = self._generated_tokens = 0
        self.weight_version = 0
        self.stopped = False

    def break_down(self, last_words: str) -> None:
        """Behave from now on like an engine that died beyond repair."""
        self._last_words = last_words
        self._broken.set()

    async def start(self, progress: Callable[[str], None]) -> None:
        progress("reading the script")

    def _reply_to(self, token_ids: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        if callable(self._reply):
            return self._reply(token_ids, sampling)
        try:
            return self._reply[tuple(token_ids)]
        except KeyError:
            raise InferenceError(f"the script has no reply to the prompt {list(token_ids)}") from None

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, priority: int
    ) -> Completion:
        self._check_alive()
        reply = self._reply_to(token_ids, sampling)
        aborted = self._running[request_id] = asyncio.Event()
        self._prompt_tokens += len(token_ids)
        out: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = FinishReason.STOP
        try:
            for token in reply:
                await asyncio.sleep(self._token_s)
                self._check_alive()
                if aborted.is_set() or len(out) == sampling.max_tokens:
                    reason = FinishReason.ABORT if aborted.is_set() else FinishReason.LENGTH
                    break
                logprobs.append(scripted_logprob((out or token_ids)[-1], token, self.weight_version))
                versions.append(self.weight_version)
                out.append(token)
                self._generated_tokens += 1
                if token in sampling.stop_token_ids:
                    break
        finally:
            del self._running[request_id]
        return Completion(out, logprobs, reason, spans_of(versions))

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._check_alive()
        return scripted_scores(token_ids, self.weight_version)

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check_alive()
        self.weight_version = update.version

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
