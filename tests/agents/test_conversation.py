"""Ids only grow, exactly the engine's ids are trained, and limits end a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def converse(chat: ChatFormat, turns: Any, sampling: SamplingParams | None = None, **limits: Any) -> TokenConversation:
    bounds = {"max_context_tokens": 4096, "max_turn_tokens": 256, **limits}
    llm = turns if isinstance(turns, ScriptedLLM) else ScriptedLLM(chat, turns)
    return TokenConversation(chat, llm, sampling or SamplingParams(), **bounds)


def completion(ids: list[int], finish: FinishReason = FinishReason.STOP, **changes: Any) -> Completion:
    values = {"logprobs": [-0.1 * i for i in range(len(ids))], "versions": [VersionSpan(3, 0, len(ids))], **changes}
    return Completion(ids, finish_reason=finish, **values)


USER = [Message("user", "hi")]
texts = st.text(max_size=20) | st.sampled_from(["<bash>cat a</bash>", "<|im_end|>", "\n\n", " x"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, st.booleans(), texts), min_size=1, max_size=5), st.data())
async def test_ids_only_grow_and_exactly_the_engines_are_trained(
    chat: ChatFormat, turns: list[tuple[str, bool, str]], data: st.DataObject
) -> None:
    script, rendered, engine_ids = [], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", []
    for written, ended, said in turns:
        ids = [*chat.encode_text(written), *([chat.end_of_turn_id] if ended else [])] or chat.encode_text("x")
        cut = data.draw(st.integers(0, len(ids)))
        spans = [VersionSpan(v, a, b) for v, (a, b) in enumerate([(0, cut), (cut, len(ids))]) if a < b]
        script.append(completion(ids, FinishReason.STOP if ended else FinishReason.LENGTH, versions=spans))
        engine_ids.append(ids)
        closed = ids[-1] == chat.end_of_turn_id
        rendered += chat.decode(ids, control_tokens=True) + ("" if closed else "<|im_end|>")
        rendered += f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    conversation = converse(chat, script, max_context_tokens=100_000)
    conversation.append(USER)
    seen = conversation.trajectory.token_ids
    for (_, ended, said), turn in zip(turns, script, strict=True):
        await conversation.generate(max_tokens=None if ended else len(turn.token_ids))
        conversation.append([Message("user", said)])
        ids = conversation.trajectory.token_ids
        assert ids[: len(seen)] == seen
        seen = ids
    trajectory = conversation.trajectory
    trained = [i for i, t in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if t]
    assert trained == [i for turn in engine_ids for i in turn]
    reported = [p for p, t in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if t]
    assert reported == [p for turn in script for p in turn.logprobs]
    if all("\ufffd" not in chat.decode(turn) for turn in engine_ids):
        assert chat.decode(trajectory.token_ids, control_tokens=True) == rendered


async def test_segments_carry_the_weight_versions(chat: ChatFormat) -> None:
    turn = completion([5, 6, 7], versions=[VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)])
    conversation = converse(chat, [turn])
    conversation.append(USER)
    await conversation.generate()
    assert [(s.token_ids, s.weight_version) for s in conversation.trajectory.segments if s.trained] == [
        ([5, 6], 1),
        ([7], 2),
    ]


async def test_text_comes_without_control_tokens(chat: ChatFormat) -> None:
    conversation = converse(chat, ["answer: 5"])
    conversation.append(USER)
    assert await conversation.generate() == "answer: 5"
    assert conversation.trajectory.messages == [*USER, Message("assistant", "answer: 5")]
    assert not conversation.truncated


async def test_a_turn_cut_at_its_limit_is_truncated_and_can_go_on(chat: ChatFormat) -> None:
    conversation = converse(chat, ["a long turn that never ends", "x"], max_turn_tokens=3)
    conversation.append(USER)
    await conversation.generate()
    assert conversation.truncated
    before = conversation.trajectory.num_tokens
    conversation.append(USER)
    glue = conversation.trajectory.segments[-1]
    assert not glue.trained
    assert conversation.trajectory.token_ids[before] == chat.end_of_turn_id


async def test_the_context_limit_bounds_the_turn(chat: ChatFormat) -> None:
    llm = ScriptedLLM(chat, ["a long turn that never ends " * 5])
    prompt = len(chat.first_prompt(USER))
    conversation = converse(chat, llm, max_context_tokens=prompt + 4)
    conversation.append(USER)
    await conversation.generate()
    assert llm.calls[0][1].max_tokens == 4
    assert conversation.truncated
    assert conversation.trajectory.num_tokens == prompt + 4


async def test_a_message_that_does_not_fit_ends_the_conversation(chat: ChatFormat) -> None:
    llm = ScriptedLLM(chat, ["ok"])
    conversation = converse(chat, llm, max_context_tokens=60)
    conversation.append(USER)
    await conversation.generate()
    before = conversation.trajectory
    conversation.append([Message("user", "z" * 200)])
    assert conversation.truncated
    assert await conversation.generate() == ""
    assert conversation.trajectory.token_ids == before.token_ids
    assert len(llm.calls) == 1


def test_a_first_prompt_that_does_not_fit_is_an_error_that_names_the_limit(chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="max_context_tokens=10"):
        converse(chat, [], max_context_tokens=10).append(USER)


async def test_each_turn_and_each_sample_has_its_own_seed(chat: ChatFormat) -> None:
    async def seeds(seed: int | None, scope: str) -> list[int | None]:
        llm = ScriptedLLM(chat, ["a", "b"])
        conversation = converse(chat, llm, SamplingParams(seed=seed), seed_scope=scope)
        for _ in range(2):
            conversation.append(USER)
            await conversation.generate()
        return [sampling.seed for _, sampling in llm.calls]

    assert await seeds(7, "row/0") == await seeds(7, "row/0")
    assert len({*await seeds(7, "row/0"), *await seeds(7, "row/1"), *await seeds(8, "row/0")}) == 6
    assert await seeds(None, "row/0") == [None, None]
    assert all(isinstance(s, int) and 0 <= s < 2**31 for s in await seeds(7, "x"))


async def test_stop_ids_reach_the_engine(chat: ChatFormat) -> None:
    llm = ScriptedLLM(chat, ["a"])
    conversation = converse(chat, llm, SamplingParams(stop_token_ids=[9]))
    conversation.append(USER)
    await conversation.generate()
    assert set(llm.calls[0][1].stop_token_ids) == {9, *chat.stop_token_ids}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completion([]), "no token ids"),
        (completion([5, 6], logprobs=[]), "2 token ids but 0 logprobs"),
        (completion([5, 6], versions=[]), "do not cover"),
        (completion([5, 6], versions=[VersionSpan(1, 0, 1)]), "do not cover"),
        (completion([5, 6], versions=[VersionSpan(1, 1, 2), VersionSpan(1, 0, 1)]), "do not cover"),
        (InferenceError("server is gone"), "server is gone"),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_refused(chat: ChatFormat, answer: Any, message: str) -> None:
    conversation = converse(chat, [answer])
    conversation.append(USER)
    with pytest.raises(InferenceError, match=message):
        await conversation.generate()
    assert conversation.trajectory.num_trained_tokens == 0


async def test_an_aborted_turn_keeps_its_ids_and_raises(chat: ChatFormat) -> None:
    conversation = converse(chat, [completion([5, 6], FinishReason.ABORT)])
    conversation.append(USER)
    with pytest.raises(InferenceError, match="aborted turn 1 after 2 tokens"):
        await conversation.generate()
    assert conversation.trajectory.num_trained_tokens == 2


async def test_wrong_order_of_calls_is_an_error(chat: ChatFormat, tmp_path: Path) -> None:
    conversation = converse(chat, ["a"])
    with pytest.raises(ValueError, match="nothing to answer"):
        await conversation.generate()
    conversation.append(USER)
    with pytest.raises(ValueError, match="already open"):
        conversation.append(USER)
