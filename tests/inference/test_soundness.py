"""Which answers training may have."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from prorl_hpc.inference.protocol import BadAnswer
from prorl_hpc.inference.soundness import check_completion
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan

GOOD = Completion([5, 99], [-0.1, 0.0], FinishReason.STOP, [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)])


def test_a_good_one_and_one_that_was_broken_off() -> None:
    check_completion(GOOD, 100, "s", 2)
    check_completion(GOOD, 0, "s", 3)
    check_completion(Completion([], [], FinishReason.ABORT, []), 100, "s", 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [5, 100]}, r"token id 100, which is not in the model's vocabulary \(0 to 99\)"),
        ({"token_ids": [-1, 5]}, "token id -1"),
        ({"token_ids": [5]}, "1 token ids and 2 logprobs"),
        ({"logprobs": [-0.1, float("nan")]}, "nan as the logprob"),
        ({"logprobs": [-0.1, float("-inf")]}, "-inf as the logprob"),
        ({"logprobs": [-0.1, 0.5]}, "0.5 as the logprob"),
        ({"logprobs": [-9999.0, -0.1]}, "-9999.0 as the logprob"),
        ({"token_ids": [5, 6, 7], "logprobs": [-0.1] * 3}, "returned 3 tokens: asked for were at most 2"),
        ({"token_ids": [], "logprobs": [], "versions": []}, r"no tokens \(finish reason stop\)"),
        ({"token_ids": [], "logprobs": [], "versions": [], "finish_reason": FinishReason.LENGTH}, "no tokens"),
        ({"token_ids": [], "logprobs": [], "finish_reason": FinishReason.ABORT}, "every token must have one version"),
        ({"versions": []}, "every token must have one version"),
        ({"versions": [VersionSpan(1, 0, 1)]}, "every token must have one version"),
        ({"versions": [VersionSpan(1, 0, 3)]}, "every token must have one version"),
        ({"versions": [VersionSpan(1, 1, 2), VersionSpan(1, 0, 1)]}, "every token must have one version"),
        ({"versions": [VersionSpan(-1, 0, 2)]}, "every token must have one version"),
    ],
)
def test_a_bad_one_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadAnswer, match=words) as refused:
        check_completion(replace(GOOD, **changes), 100, "inference-3", 2)
    assert str(refused.value).startswith("inference-3 ")
