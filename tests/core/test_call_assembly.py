"""Random trees of calls are put together again exactly, whatever clients make of what they got."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from prorl_hpc.core.call_assembly import Thread, answer_keys, find_place, message_key, tools_key
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema


@dataclass(eq=False)
class Kept:
    """A conversation as the gateway would keep it: ``trained`` are the places of what was generated in it."""

    thread: Thread
    messages: list[Message] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)


class Assembler:
    """Keeps whole messages beside the threads, so that both can be compared with what was sent."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def ask(self, messages: list[Message], tools: str = "") -> Kept:
        keys = [message_key(message) for message in messages]
        place = find_place(keys, tools, [kept.thread for kept in self.kept])
        old = next((kept for kept in self.kept if kept.thread is place.thread), None)
        if old is None:
            kept = Kept(Thread(tools))
        elif place.fork:
            kept = Kept(old.thread.fork(place.kept), old.messages[: place.kept])
        else:
            kept = old
            assert not kept.thread.busy and len(kept.messages) == place.kept
        kept.messages += messages[place.kept :]
        kept.thread.ask(keys[place.kept :])
        if kept not in self.kept:
            self.kept.append(kept)
        assert len(kept.thread.messages) == len(kept.messages) == len(messages)
        assert [message_key(m).role for m in kept.messages] == [k.role for k in keys]
        return kept

    def answer(self, kept: Kept, message: Message) -> None:
        kept.trained.append(len(kept.messages))
        kept.messages.append(message)
        kept.thread.answer(answer_keys(message))


texts = st.sampled_from(["a", "b", " a  b ", "", "c\n"])
arguments = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 1) | texts, max_size=2)
tool_calls = st.lists(st.builds(ToolCall, st.sampled_from(["f", "g"]), arguments), max_size=2)
answers = st.builds(Message, st.just("assistant"), texts, tool_calls=tool_calls, reasoning=texts)
others = st.builds(Message, st.sampled_from(["user", "tool"]), texts)


def as_a_client_has_it(data: st.DataObject, message: Message) -> Message:
    """White space changed, thought and ids dropped, keys in another order; with calls, perhaps no text."""
    calls = [ToolCall(call.name, dict(reversed(call.arguments.items()))) for call in message.tool_calls]
    text = data.draw(st.sampled_from([message.content, message.content.strip(), " ".join(message.content.split())]))
    if calls and data.draw(st.booleans()):
        text = ""
    return Message("assistant", text, tool_calls=calls)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_trees_of_calls_with_unique_answers_are_the_fewest_conversations(data: st.DataObject) -> None:
    assembler, numbers = Assembler(), itertools.count()
    histories: list[list[Message]] = [[]]
    ids = itertools.count()
    asked: dict[int, Kept] = {}
    tips = dict[int, list[Message]]()
    for _ in range(data.draw(st.integers(1, 12))):
        history = data.draw(st.sampled_from(histories))
        sent = [as_a_client_has_it(data, m) if m.role == "assistant" else m for m in history]
        call = [*sent, *data.draw(st.lists(others, min_size=1, max_size=2))]
        kept = assembler.ask(call)
        made = data.draw(answers)
        marked = [ToolCall(f"{c.name}{next(numbers)}", c.arguments) for c in made.tool_calls]
        answer = replace(made, content=f"{made.content} #{next(numbers)}", tool_calls=marked)
        # What is kept is what was sent, in the words in which it was first there.
        expected = [*history, *call[len(history) :]]
        assert kept.messages == expected
        before = len(assembler.kept)
        assembler.answer(kept, answer)
        assert len(assembler.kept) == before
        histories.append([*expected, answer])
        number = next(ids)
        asked[number], tips[number] = kept, expected
    trained = [(id(kept), place) for kept in assembler.kept for place in kept.trained]
    assert len(trained) == len(set(trained)) == len(asked)
    for number, kept in asked.items():
        assert kept.messages[: len(tips[number])] == tips[number] and len(tips[number]) in kept.trained
    # Each further conversation left another one where that one had gone on already, or shares nothing with any.
    for first, second in itertools.combinations(assembler.kept, 2):
        assert first.messages != second.messages[: len(first.messages)] or not first.trained


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_parallel_calls_with_equal_answers(data: st.DataObject) -> None:
    """Answers that say the same in any order of calls and answers: nothing is lost, doubled or mixed up."""
    assembler = Assembler()
    waiting: list[tuple[Kept, list[Message]]] = []
    histories: list[list[Message]] = [[]]
    num_answers = 0
    for _ in range(data.draw(st.integers(1, 14))):
        if waiting and data.draw(st.booleans()):
            kept, call = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            assert [message_key(m) for m in kept.messages[: len(call)]] == [message_key(m) for m in call]
            assert len(kept.messages) == len(call), "nobody else wrote into it meanwhile"
            if data.draw(st.booleans()):
                kept.thread.busy = False  # cancelled: may be asked again
                continue
            answer = data.draw(answers)
            assembler.answer(kept, answer)
            num_answers += 1
            histories.append([*call, answer])
        else:
            history = data.draw(st.sampled_from(histories))
            call = [*history, *data.draw(st.lists(others, min_size=1, max_size=2))]
            waiting.append((assembler.ask(call), call))
    assert sum(len(kept.trained) for kept in assembler.kept) == num_answers
    for kept in assembler.kept:
        assert all(kept.messages[place].role == "assistant" for place in kept.trained)


def said(text: str) -> Message:
    return Message("user", text)


def test_the_same_prompt_at_the_same_time_becomes_branches() -> None:
    assembler = Assembler()
    kept = [assembler.ask([said("p")]) for _ in range(3)]
    assert len(assembler.kept) == 3
    for one, text in zip(kept, "abc", strict=True):
        assembler.answer(one, Message("assistant", text))
    assert assembler.ask([said("p"), Message("assistant", "b"), said("on")]) is kept[1]


def test_other_tools_are_another_conversation() -> None:
    assembler = Assembler()
    first = assembler.ask([said("p")], tools_key([ToolSchema("f")]))
    assembler.answer(first, Message("assistant", "a"))
    assert assembler.ask([said("p"), Message("assistant", "a"), said("q")], tools_key([])) is not first


@pytest.mark.parametrize("rest", [[said("q")], [said("q"), Message("assistant", "x"), said("r")]])
def test_a_rewritten_answer_begins_anew(rest: list[Message]) -> None:
    assembler = Assembler()
    first = assembler.ask([said("p")])
    assembler.answer(first, Message("assistant", "a"))
    anew = assembler.ask([said("p"), Message("assistant", "another"), *rest])
    assert anew is not first and anew.trained == []


def test_an_ambiguous_history_goes_on_where_it_ends() -> None:
    """Two conversations said the same; one has gone on already."""
    assembler = Assembler()
    first, second = assembler.ask([said("p")]), assembler.ask([said("p")])
    for one in (first, second):
        assembler.answer(one, Message("assistant", "a"))
    history = [said("p"), Message("assistant", "a")]
    assert assembler.ask([*history, said("x")]) is first
    assert assembler.ask([*history, said("y")]) is second
    assert len(assembler.kept) == 2
