"""vLLM's answers, checked and made ours. An answer without ids or logprobs is refused, never filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason
    weight_versions: list[_Span]


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


_COUNTERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)


def completion_of(answer: Any, server: str) -> Completion:
    """The one choice of a /inference/v1/generate answer."""
    try:
        generated = msgspec.convert(answer, _Generated)
        (choice,) = generated.choices
    except (msgspec.ValidationError, ValueError) as error:
        raise InferenceError(
            f"{server} answers without what training needs (token ids, a logprob for each, weight versions): {error}"
        ) from error
    logprobs = choice.logprobs.content
    if [entry.token_id for entry in logprobs] != choice.token_ids:
        raise InferenceError(
            f"{server} returned {len(choice.token_ids)} token ids and {len(logprobs)} logprobs that do not belong to them"
        )
    details = generated.usage.prompt_tokens_details
    return Completion(
        token_ids=choice.token_ids,
        logprobs=[entry.logprob for entry in logprobs],
        finish_reason=choice.finish_reason,
        versions=[VersionSpan(int(s.version), s.start, s.end) for s in choice.weight_versions if s.end > s.start],
        cached_prompt_tokens=(details.cached_tokens or 0) if details is not None else 0,
    )


def prompt_logprobs_of(answer: Any, token_ids: Sequence[int], server: str) -> list[float]:
    """Logprobs of tokens 1..n-1 from ``prompt_logprobs``, a list of {id: {"logprob": …}} whose first is None."""
    entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise InferenceError(f"{server} returned no logprobs for a prompt of {len(token_ids)} tokens")
    try:
        return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise InferenceError(f"{server} left a prompt token out of its logprobs: {error!r}") from error


def read_counters(metrics: str) -> dict[str, int]:
    """vLLM's own counters out of the Prometheus text, summed over engines; 0 where one is not there yet."""
    totals = dict.fromkeys(_COUNTERS, 0)
    for line in metrics.splitlines():
        name = line.split("{", 1)[0]
        if name in totals:
            totals[name] += int(float(line.rsplit(" ", 1)[1]))
    return totals
