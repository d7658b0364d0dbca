"""An engine serves one policy on this node. Implementations: vllm, transformers, scripted; one contract suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prorl_hpc.inference.model_identity import ModelIdentity
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams


class ServerDown(InferenceError):
    """The server's fault and not the request's: another server may answer it."""


class NotServed(ServerDown):
    """It answers that it has no such address, or not for us (404, 401, …): waiting does not help."""


class BadAnswer(ServerDown):
    """It answers, but nothing that training may have: ids out of the vocabulary, logprobs that are none, no JSON."""


@dataclass(frozen=True)
class EngineLoad:
    """Requests running and waiting now; tokens since start."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int


class Engine(Protocol):
    """All coroutines raise ServerDown with the engine's own last words when it breaks, and InferenceError when it
    refuses what was asked."""

    @property
    def description(self) -> str:
        """For people: ``vllm 0.32.0``."""
        ...

    @property
    def model(self) -> ModelIdentity:
        """What is served, known once it is started."""
        ...

    @property
    def weight_version(self) -> int: ...

    async def start(self, progress: Callable[[str], None]) -> None:
        """Load the model; ``progress`` gets short texts while people wait."""
        ...

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, priority: int
    ) -> Completion:
        """Cancelling this coroutine ends the request in the engine. Logprobs are those of the distribution
        sampled from; an engine that returns no ids or no logprobs is an error, never zeros. A stop string ends the
        turn, and the tokens up to the one that completes it stay."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what it has with FinishReason.ABORT."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of tokens 1..n-1 given those before (length n-1), at temperature 1."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Load new weights while requests in flight go on (their later tokens carry the new version) and forget
        the prefix cache. Does not look at ``update.probe``."""
        ...

    async def load(self) -> EngineLoad: ...

    async def wait_broken(self) -> str:
        """Return, with the engine's last words, only when it is down for good (its restarts are used up).

        While it is being started again, ``load`` and ``generate`` raise ServerDown, and afterwards
        ``weight_version`` is 0 again: the model as it lies on disk."""
        ...

    async def stop(self) -> None:
        """End it and prove that its processes are gone. Idempotent."""
        ...
