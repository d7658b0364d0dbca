"""What is read out of vLLM's answers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prorl_hpc.inference.protocol import BadAnswer, ServerDown
from prorl_hpc.inference.vllm_wire import (
    completion_of,
    completion_of_completions,
    completions_body,
    prompt_logprobs_of,
    refusal,
    sampling_params,
)
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
    assert isinstance(refused.value, BadAnswer)


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
    sampling = SamplingParams(temperature=0.5, stop_token_ids=[9])
    body = json.loads(completions_body("m", [1, 2], sampling, 7, "r"))
    assert body["prompt"] == [1, 2] and body["max_tokens"] == 7 and body["stop_token_ids"] == [9]
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.5, 1.0, -1, 1.0)
    assert "seed" not in body and "stop" not in body
    body = json.loads(completions_body("m", [1], SamplingParams(seed=4, stop=["</a>"]), 7, "r"))
    assert (body["seed"], body["stop"], body["skip_special_tokens"]) == (4, ["</a>"], False)


def test_stop_strings_need_text_and_nothing_else_does() -> None:
    assert sampling_params(SamplingParams(), 5)["detokenize"] is False
    params = sampling_params(SamplingParams(stop=["END"]), 5)
    assert (params["stop"], params["detokenize"], params["skip_special_tokens"]) == (["END"], True, False)


def ours(**changes: Any) -> Completion:
    content = [{"token_id": 5, "logprob": -0.1}, {"token_id": 6, "logprob": -0.2}]
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return completion_of(json.dumps({"choices": [choice | changes]}).encode(), "s")


def test_an_answer_of_our_own_servers() -> None:
    assert ours() == Completion([5, 6], [-0.1, -0.2], FinishReason.STOP, [VersionSpan(3, 0, 2)])


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"token_ids": ["a", "b"]},
        {"token_ids": [5.5, 6]},
        {"logprobs": None},
        {"logprobs": {"content": [{"token_id": 5, "logprob": None}, {"token_id": 6, "logprob": -0.1}]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": -0.1}]}},
        {"finish_reason": "error"},
        {"weight_versions": None},
        {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
    ],
)
def test_an_answer_of_our_own_that_lacks_something_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match=r"s (answers|returned) "):
        ours(**changes)


@pytest.mark.parametrize("answer", [b"", b"<html>502", b"[]", b'{"choices": []}', b"\xff\xfe", b'{"choices": [{}]'])
def test_what_is_no_answer_of_our_own_is_refused(answer: bytes) -> None:
    with pytest.raises(BadAnswer, match="without what training needs"):
        completion_of(answer, "s")
    with pytest.raises(BadAnswer, match="no logprobs of a prompt"):
        prompt_logprobs_of(answer, [1, 2], "s")


def test_logprobs_of_a_prompt() -> None:
    def answer(*entries: Any) -> bytes:
        return json.dumps({"prompt_logprobs": entries}).encode()

    assert prompt_logprobs_of(answer(None, {"7": {"logprob": -1.5, "rank": 1}}), [3, 7], "s") == [-1.5]
    for entries in ((None,), (None, None), (None, {"8": {"logprob": -1.5}})):
        with pytest.raises(BadAnswer):
            prompt_logprobs_of(answer(*entries), [3, 7], "s")
