"""Which conversation does a call to the model go on with?

A client of a chat API sends its whole conversation with every call, and what the model answered as it understood it. A
call goes on with the conversation that it repeats the most of: at that one's end it extends it; before it, or while
that one is being answered, it forks it; a call that repeats nothing begins anew.

Invariants: an answer is put into exactly one thread, the one that was asked; what a thread holds is, message by
message, what its last call sent; only places where an assistant's turn ended or begins are gone on from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prorl_hpc.messages.trajectory import Message, ToolSchema


class MessageKey(NamedTuple):
    """What two forms of one message have in common. Ids of calls and thoughts are left out: clients drop them."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


def message_key(message: Message) -> MessageKey:
    """White space in an assistant's text does not count, nor does the order of keys in its calls' arguments."""
    if message.role != "assistant":
        return MessageKey(message.role, message.content)
    calls = tuple((call.name, _canonical(call.arguments)) for call in message.tool_calls)
    return MessageKey("assistant", " ".join(message.content.split()), calls)


def answer_keys(message: Message) -> frozenset[MessageKey]:
    """The forms in which clients send an answer back: some keep only its calls."""
    key = message_key(message)
    return frozenset({key, key._replace(text="")}) if key.calls else frozenset({key})


def tools_key(tools: Sequence[ToolSchema]) -> str:
    """Equal for tools that are told of in the same words."""
    return _canonical([tool.as_function() for tool in tools])


@dataclass(eq=False)
class Thread:
    """A conversation as its calls show it. ``messages``: the keys of each, any of which may come back. ``asked`` and
    ``answered``: after so many messages an assistant's turn began, or ended. ``busy``: it is being answered."""

    tools: str
    messages: list[frozenset[MessageKey]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    busy: bool = False

    def ask(self, messages: Sequence[MessageKey]) -> None:
        """A call has added ``messages``, perhaps none, and waits."""
        self.messages += [frozenset({key}) for key in messages]
        self.asked.add(len(self.messages))
        self.busy = True

    def answer(self, keys: frozenset[MessageKey]) -> None:
        self.messages.append(keys)
        self.answered.add(len(self.messages))
        self.busy = False

    def fork(self, kept: int) -> Thread:
        """Another one that begins with the first ``kept`` messages."""
        return Thread(
            self.tools,
            self.messages[:kept],
            {n for n in self.asked if n <= kept},
            {n for n in self.answered if n <= kept},
        )


@dataclass(frozen=True)
class Place:
    """Where a call belongs: its messages from ``kept`` on come after the first ``kept`` of ``thread`` (None: a new one).
    ``fork``: in a conversation of their own."""

    thread: Thread | None = None
    kept: int = 0
    fork: bool = False


def find_place(call: Sequence[MessageKey], tools: str, threads: Sequence[Thread]) -> Place:
    """The longest beginning wins; among equal ones a thread's end, then the older thread."""
    best, best_rank = Place(), (0, False)
    for thread in threads:
        if thread.tools != tools:
            continue
        kept = _usable(call, thread)
        at_end = kept == len(thread.messages) and not thread.busy
        if kept and (kept, at_end) > best_rank:
            best, best_rank = Place(thread, kept, fork=not at_end), (kept, at_end)
    return best


def _usable(call: Sequence[MessageKey], thread: Thread) -> int:
    """How many messages of ``thread`` the call can go on from."""
    common = 0
    for key, known in zip(call, thread.messages, strict=False):
        if key not in known:
            break
        common += 1
    if common == len(call) and common in thread.asked:
        return common
    return max((n for n in thread.answered if n <= common and n < len(call) and call[n].role != "assistant"), default=0)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
