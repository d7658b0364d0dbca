"""Whether an answer is one that training may have. What is not is refused, never mended."""

from __future__ import annotations

import math

from prorl_hpc.inference.protocol import BadAnswer
from prorl_hpc.messages.inference import Completion, FinishReason

_LEAST, _MOST = -1000.0, 1e-3
"""A token that was sampled has a probability above float32's smallest number, whose logarithm is -104; vLLM writes -9999
for what is no number. A little above 0 is rounding."""


def check_completion(completion: Completion, vocab_size: int, server: str, max_tokens: int) -> None:
    """BadAnswer names the server and the fault. ``vocab_size`` 0: not known, so ids are only not negative. ``max_tokens``:
    what was asked for; only an answer that was broken off may have no tokens at all."""
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) != len(logprobs):
        raise BadAnswer(
            f"{server} returned {len(ids)} token ids and {len(logprobs)} logprobs that do not belong to them"
        )
    if len(ids) > max_tokens:
        raise BadAnswer(f"{server} returned {len(ids)} tokens: asked for were at most {max_tokens}")
    if not ids and completion.finish_reason is not FinishReason.ABORT:
        raise BadAnswer(
            f"{server} returned no tokens (finish reason {completion.finish_reason}): expected is at least one"
        )
    if ids and (min(ids) < 0 or (vocab_size and max(ids) >= vocab_size)):
        worst = min(ids) if min(ids) < 0 else max(ids)
        allowed = f"0 to {vocab_size - 1}" if vocab_size else "0 or more"
        raise BadAnswer(f"{server} returned token id {worst}, which is not in the model's vocabulary ({allowed})")
    wrong = [value for value in logprobs if not (math.isfinite(value) and _LEAST < value <= _MOST)]
    if wrong:
        raise BadAnswer(
            f"{server} returned {wrong[0]} as the logprob of a token that it sampled ({len(wrong)} of {len(ids)} are no "
            "logprobs): must be finite and at most 0"
        )
    _check_versions(completion, server)


def _check_versions(completion: Completion, server: str) -> None:
    reached = 0
    for span in completion.versions:
        if span.version < 0 or span.start != reached or span.end <= span.start:
            break
        reached = span.end
    else:
        if reached == len(completion.token_ids):
            return
    raise BadAnswer(
        f"{server} says of {len(completion.token_ids)} tokens that their weights are {completion.versions}: every token "
        "must have one version"
    )
