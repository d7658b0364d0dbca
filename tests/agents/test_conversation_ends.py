"""Each limit ends a conversation with its own finish reason, and a fork inherits tokens without training on them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Finish, Message
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model

USER = [Message("user", "hi")]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def converse(chat: ChatFormat, answer: str, sampling: SamplingParams | None = None, **limits: Any) -> TokenConversation:
    bounds = {"max_context_tokens": 4096, "max_turn_tokens": 256, **limits}
    return TokenConversation(chat, ScriptedLLM(chat, lambda prompt: answer), sampling or SamplingParams(), **bounds)


@pytest.mark.parametrize(
    ("limits", "finish"),
    [
        ({"max_turn_tokens": 3}, Finish.TURN_TOKENS),
        ({"max_rollout_tokens": 3}, Finish.ROLLOUT_TOKENS),
        ({"max_context_tokens": 20}, Finish.CONTEXT),
    ],
)
async def test_a_cut_turn_says_which_limit_cut_it(chat: ChatFormat, limits: dict[str, int], finish: Finish) -> None:
    conversation = converse(chat, "one two three four five six seven eight nine", **limits)
    conversation.append(USER)
    await conversation.generate()
    assert (conversation.finish, conversation.truncated) == (finish, True)
    conversation.end(Finish.ANSWER)
    trajectory = conversation.trajectory
    assert (trajectory.finish, trajectory.truncated) == (finish, True)


async def test_the_rollouts_tokens_are_counted_over_its_turns(chat: ChatFormat) -> None:
    conversation = converse(chat, "word", max_rollout_tokens=1000)
    conversation.append(USER)
    await conversation.generate()
    used = conversation.trajectory.num_trained_tokens
    conversation = converse(chat, "word", max_rollout_tokens=used)
    conversation.append(USER)
    await conversation.generate()
    assert not conversation.truncated
    conversation.append(USER)
    assert await conversation.generate() == ""
    assert conversation.finish is Finish.ROLLOUT_TOKENS


async def test_the_end_is_what_the_loop_says_if_nothing_was_cut(chat: ChatFormat) -> None:
    conversation = converse(chat, "word")
    conversation.append(USER)
    await conversation.generate()
    assert conversation.finish is Finish.UNKNOWN
    conversation.end(Finish.ANSWER)
    assert conversation.trajectory.finish is Finish.ANSWER


async def test_a_stop_string_of_the_run_is_a_finish_and_one_of_the_call_is_not(chat: ChatFormat) -> None:
    conversation = converse(chat, "so DONE", SamplingParams(stop=["DONE"]))
    conversation.append(USER)
    await conversation.generate()
    assert (conversation.finish, conversation.truncated) == (Finish.STOP_STRING, False)
    conversation = converse(chat, "so DONE")
    conversation.append(USER)
    await conversation.generate(stop=["DONE"])
    assert conversation.finish is Finish.UNKNOWN


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.data())
async def test_a_fork_continues_the_same_ids_and_trains_only_its_own(
    chat: ChatFormat, turns: int, data: st.DataObject
) -> None:
    conversation = converse(chat, "word")
    for _ in range(turns):
        conversation.append(USER)
        await conversation.generate()
    before = conversation.trajectory
    at = data.draw(st.integers(1, 2 * turns))
    fork = conversation.fork(at)
    inherited = fork.trajectory
    assert before.token_ids[: inherited.num_tokens] == inherited.token_ids
    assert inherited.messages == before.messages[:at]
    assert inherited.num_trained_tokens == 0
    if at % 2 == 0:  # after an assistant's turn
        fork.append([Message("user", "other")])
    await fork.generate()
    assert fork.last_turn is not None
    assert fork.trajectory.num_trained_tokens == len(fork.last_turn.token_ids)
    assert conversation.trajectory == before


async def test_a_fork_elsewhere_is_refused_with_the_places_there_are(chat: ChatFormat) -> None:
    conversation = converse(chat, "word")
    conversation.append([Message("system", "s"), Message("user", "u")])
    await conversation.generate()
    with pytest.raises(ValueError, match="after 1 messages: turns end or begin after 2, 3"):
        conversation.fork(1)


async def test_a_fork_draws_with_another_seed(chat: ChatFormat) -> None:
    llm = ScriptedLLM(chat, lambda prompt: "word")
    conversation = TokenConversation(chat, llm, SamplingParams(seed=1), max_context_tokens=4096, max_turn_tokens=64)
    conversation.append(USER)
    await conversation.generate()
    await conversation.fork(1).generate()
    await conversation.fork(1).generate()
    seeds = [sampling.seed for _, sampling in llm.calls]
    assert len(set(seeds)) == 3


async def test_a_turn_that_the_caller_wanted_no_longer_is_not_cut(chat: ChatFormat) -> None:
    conversation = converse(chat, "one two three four five six seven", max_turn_tokens=5)
    conversation.append(USER)
    await conversation.generate(max_tokens=3)
    assert (conversation.finish, conversation.truncated) == (Finish.UNKNOWN, False)
    assert conversation.last_turn is not None and conversation.last_turn.finish_reason is FinishReason.LENGTH
    conversation.append(USER)
    await conversation.generate(max_tokens=100)
    assert conversation.finish is Finish.TURN_TOKENS


@pytest.mark.parametrize(
    ("tokens", "finish", "problem"),
    [(2, FinishReason.LENGTH, "after 2 of 8 tokens"), (9, FinishReason.STOP, "9 tokens where at most 8 were asked")],
)
async def test_a_server_that_does_not_keep_to_the_limits_is_broken(
    chat: ChatFormat, tokens: int, finish: FinishReason, problem: str
) -> None:
    answer = Completion([5] * tokens, [-0.5] * tokens, finish, [VersionSpan(1, 0, tokens)])
    llm = ScriptedLLM(chat, [answer])
    conversation = TokenConversation(chat, llm, SamplingParams(), max_context_tokens=4096, max_turn_tokens=8)
    conversation.append(USER)
    with pytest.raises(InferenceError, match=problem):
        await conversation.generate()


async def test_ids_made_before_are_those_that_append_makes(chat: ChatFormat) -> None:
    one, other = converse(chat, "word"), converse(chat, "word")
    for _ in range(2):
        one.append(USER)
        other.append(USER, ids=other.tokenize(USER))
        await one.generate()
        await other.generate()
    assert one.trajectory == other.trajectory
