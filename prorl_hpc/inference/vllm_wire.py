"""vLLM's answers, checked and made ours. An answer without ids or logprobs is refused, never filled in.

Two routes: ``/inference/v1/generate`` of our own servers, which says which weights wrote which tokens, and the
OpenAI-compatible ``/v1/completions`` of servers outside the run, which does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from prorl_hpc.inference.protocol import BadAnswer, NotServed, ServerDown
from prorl_hpc.inference.vllm_settings import MODEL_NAME
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams

_REQUESTS_FAULT = (400, 413, 422)
_PASSING = (408, 421, 425, 429)
_MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^<>]*>", re.DOTALL | re.IGNORECASE)
_SHOWN_CHARACTERS = 300
_SHOWN_BYTES = 120
_ID_PREFIX = "token_id:"


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

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _PromptLogprob] | None]


class _TextLogprobs(msgspec.Struct):
    """``tokens`` are ``token_id:N`` where return_tokens_as_token_ids is obeyed."""

    tokens: list[str]
    token_logprobs: list[float]


class _TextChoice(msgspec.Struct):
    logprobs: _TextLogprobs
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completed(msgspec.Struct):
    choices: list[_TextChoice]
    usage: _Usage | None = None


_encoder = msgspec.json.Encoder()
_generated = msgspec.json.Decoder(_Generated)
_completed = msgspec.json.Decoder(_Completed)
_scored = msgspec.json.Decoder(_Scored)

_COUNTERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)


def refusal(server: str, route: str, status: int, text: str) -> InferenceError:
    """What an answer other than 200 means: InferenceError if the request is to blame, else ServerDown. Of its ``text``, one
    line without a page's markup."""
    kind: type[InferenceError] = InferenceError
    if status not in _REQUESTS_FAULT:
        kind = NotServed if 400 <= status < 500 and status not in _PASSING else ServerDown
    line = " ".join((_MARKUP.sub(" ", text) if text.lstrip().startswith("<") else text).split())
    shown = line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
    return kind(f"{server} answers {status} to {route}{': ' if shown else ''}{shown}")


def generate_body(
    request_id: str, token_ids: Sequence[int], params: dict[str, Any], priority: int, cache_salt: str
) -> bytes:
    """What /inference/v1/generate is asked."""
    return _encoder.encode(
        {
            "model": MODEL_NAME,
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling_params": params,
            "priority": priority,
            "cache_salt": cache_salt,
        }
    )


def sampling_params(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """vLLM's, for a turn that returns ids and their logprobs."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "seed": sampling.seed,
        "stop_token_ids": sampling.stop_token_ids,
        "logprobs": 0,
        "detokenize": False,
    }
    return params | _stop_strings(sampling)


def _stop_strings(sampling: SamplingParams) -> dict[str, Any]:
    """vLLM looks for them in the text that it makes of the ids; it returns all ids up to there."""
    if not sampling.stop:
        return {}
    return {"stop": sampling.stop, "detokenize": True, "skip_special_tokens": False}


def completion_of(answer: bytes, server: str) -> Completion:
    """The one choice of a /inference/v1/generate answer."""
    try:
        generated = _generated.decode(answer)
        (choice,) = generated.choices
        versions = [VersionSpan(int(s.version), s.start, s.end) for s in choice.weight_versions if s.end > s.start]
    except (msgspec.DecodeError, ValueError) as error:
        raise BadAnswer(
            f"{server} answers without what training needs (token ids, a logprob for each, weight versions): {error}"
            f"{_shown(answer)}"
        ) from error
    logprobs = choice.logprobs.content
    if [entry.token_id for entry in logprobs] != choice.token_ids:
        raise _do_not_belong(server, choice.token_ids, len(logprobs))
    return Completion(
        token_ids=choice.token_ids,
        logprobs=[entry.logprob for entry in logprobs],
        finish_reason=choice.finish_reason,
        versions=versions,
        cached_prompt_tokens=generated.usage.cached_tokens,
    )


def _shown(answer: bytes) -> str:
    """The beginning of an answer that does not decode, for people."""
    return f"; it begins {answer[:_SHOWN_BYTES]!r}" if answer else "; it is empty"


def completions_body(
    model: str, token_ids: Sequence[int], sampling: SamplingParams, max_tokens: int, request_id: str
) -> bytes:
    """What /v1/completions is asked. Its answer belongs to ``completion_of_completions``."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": token_ids,
        "request_id": request_id,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # a server's own defaults (a model's generation_config.json) would sample from another distribution
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sampling.stop_token_ids,
        "logprobs": 1,  # the token's own; some servers take 0 for none
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body |= {"stop": sampling.stop, "skip_special_tokens": False}
    return _encoder.encode(body)


def completion_of_completions(answer: bytes, prompt: Sequence[int], weight_version: int, server: str) -> Completion:
    """The one choice of a /v1/completions answer, whose tokens are all marked with ``weight_version``."""
    try:
        completed = _completed.decode(answer)
        (choice,) = completed.choices
    except (msgspec.DecodeError, ValueError) as error:
        raise BadAnswer(
            f"{server} answers /v1/completions without what training needs (token ids and a logprob for each): {error}"
            f"{_shown(answer)}"
        ) from error
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(prompt):
        raise BadAnswer(f"{server} has read another prompt than the {len(prompt)} token ids that it was given")
    ids, logprobs = _ids_of(choice, server), choice.logprobs.token_logprobs
    if len(ids) != len(logprobs):
        raise _do_not_belong(server, ids, len(logprobs))
    versions = [VersionSpan(weight_version, 0, len(ids))] if ids else []
    cached = completed.usage.cached_tokens if completed.usage is not None else 0
    return Completion(ids, logprobs, choice.finish_reason, versions, cached)


def _ids_of(choice: _TextChoice, server: str) -> list[int]:
    """From ``token_ids``, or from the names of the tokens; where there are both, they agree."""
    tokens = choice.logprobs.tokens
    named = [token.removeprefix(_ID_PREFIX) for token in tokens if token.startswith(_ID_PREFIX)]
    named_ids = [int(name) for name in named if name.isdecimal()]
    if choice.token_ids is None:
        if len(named_ids) != len(tokens):
            raise BadAnswer(
                f"{server} answers /v1/completions with text and without token ids: training needs a server that obeys "
                "return_token_ids (vLLM 0.10.2 or newer, with no proxy that strips them)"
            )
        return named_ids
    if named_ids and named_ids != choice.token_ids:
        raise _do_not_belong(server, choice.token_ids, len(tokens))
    return choice.token_ids


def _do_not_belong(server: str, ids: Sequence[int], logprobs: int) -> BadAnswer:
    return BadAnswer(f"{server} returned {len(ids)} token ids and {logprobs} logprobs that do not belong to them")


def prompt_logprobs_of(answer: bytes, token_ids: Sequence[int], server: str) -> list[float]:
    """Logprobs of tokens 1..n-1 from ``prompt_logprobs``, a list of {id: {"logprob": …}} whose first is None."""
    try:
        entries = _scored.decode(answer).prompt_logprobs
        if len(entries) != len(token_ids):
            raise BadAnswer(f"{server} returned {len(entries)} logprobs for a prompt of {len(token_ids)} tokens")
        return [(entry or {})[str(token)].logprob for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
    except msgspec.DecodeError as error:
        raise BadAnswer(f"{server} returned no logprobs of a prompt: {error}{_shown(answer)}") from error
    except KeyError as error:
        raise BadAnswer(f"{server} left a prompt token out of its logprobs: {error!r}") from error


def read_counters(metrics: str) -> dict[str, int]:
    """vLLM's own counters out of the Prometheus text, summed over engines; 0 where one is not there yet."""
    totals = dict.fromkeys(_COUNTERS, 0)
    for line in metrics.splitlines():
        name = line.split("{", 1)[0]
        if name in totals:
            totals[name] += int(float(line.rsplit(" ", 1)[1]))
    return totals
