"""What is read out of vLLM's answers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.inference.vllm_wire import completion_of_completions, completions_body, refusal
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams


def read(**changes: Any) -> Completion:
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.1, -0.2]} | changes.pop("logprobs", {})
    choice = {"finish_reason": "stop", "token_ids": [5, 6], "logprobs": logprobs} | changes
    return completion_of_completions(json.dumps({"choices": [choice]}).encode(), [1, 2], 3, "s")


def test_ids_and_logprobs() -> None:
    expected = Completion([5, 6], [-0.1, -0.2], FinishReason.STOP, [VersionSpan(3, 0, 2)])
    assert read() == expected
    assert read(token_ids=None) == expected  # from the names of the tokens
    assert read(logprobs={"tokens": ["a", "b"]}) == expected
    assert read(prompt_token_ids=[1, 2]) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None, "logprobs": {"tokens": ["a", "b"]}},
        {"token_ids": None, "logprobs": {"tokens": ["token_id:5", "b"]}},
        {"token_ids": None, "logprobs": {"tokens": ["token_id:5", "token_id:x"]}},
        {"token_ids": [5, 7]},
        {"token_ids": [5]},
        {"logprobs": {"token_logprobs": [-0.1, None]}},
        {"logprobs": {"token_logprobs": [-0.1]}},
        {"logprobs": {"tokens": [], "token_logprobs": []}},
        {"finish_reason": "content_filter"},
        {"prompt_token_ids": [1]},
    ],
)
def test_whatever_lacks_something_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InferenceError) as refused:
        read(**changes)
    assert not isinstance(refused.value, ServerDown)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{}]}', b"\xff\xfe"])
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(InferenceError, match="without what training needs"):
        completion_of_completions(answer, [1], 0, "s")


@pytest.mark.parametrize("status", [400, 413, 422, 301, 401, 404, 429, 500, 503])
def test_whose_fault_a_refusal_is(status: int) -> None:
    error = refusal("s", "/r", status, "x" * 9999)
    assert isinstance(error, ServerDown) is (status not in (400, 413, 422))
    assert len(str(error)) < 2100


def test_the_server_samples_from_the_policy_itself() -> None:
    """Its own defaults, such as a model's top_k, are switched off."""
    body = completions_body("m", [1, 2], SamplingParams(temperature=0.5, stop_token_ids=[9]), 7)
    assert body["prompt"] == [1, 2] and body["max_tokens"] == 7 and body["stop_token_ids"] == [9]
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.5, 1.0, -1, 1.0)
    assert "seed" not in body
    assert completions_body("m", [1], SamplingParams(seed=4), 7)["seed"] == 4
