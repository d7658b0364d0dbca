"""Conversations as the template writes them, in parts: a first prompt, and what comes after an assistant's turn.

What comes after a turn is taken from a small conversation of its own (a user, an assistant, then the new messages): so it
does not depend on what came before, and templates that rewrite what is over do not touch what was generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from prorl_hpc.agents.chat_dialect import Dialect
from prorl_hpc.agents.chat_messages import Prepared, prepare
from prorl_hpc.agents.chat_slots import Piece, slot_of, split
from prorl_hpc.agents.chat_template import ChatTemplate, TemplateRefusal
from prorl_hpc.agents.chat_tokens import ChatTokens
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema

Part = tuple[str, bool]
"""Text, and whether it is the template's."""

_ARGUMENT = "\ue003value"
"""No other text is like it."""
USER, ANSWER = Message("user", "question"), Message("assistant", "answer")


class Ends(NamedTuple):
    """Control tokens that end an assistant's turn: as the model ends its answer, as the template writes it once the
    conversation goes on, and as a turn with calls ends (empty if the template writes none). ``begin_next``: they are what
    begins the next message (GLM), so one does not stand for another."""

    final: str
    later: str
    call: str
    begin_next: bool = False

    @property
    def tokens(self) -> list[str]:
        return [end for end in dict.fromkeys((self.final, self.later, self.call)) if end]


class NoEnd(Exception):
    """An assistant's turn does not end with a control token; carries what follows it."""


class ChatWriter:
    """``ends`` is found at once; raises NoEnd and TemplateRefusal."""

    def __init__(self, template: ChatTemplate, dialect: Dialect, tokens: ChatTokens) -> None:
        self.dialect = dialect
        self._template = template
        self._tokens = tokens
        later = self._first_control(self._tail([USER, ANSWER, USER], 1))
        try:
            self.ends = Ends(self._first_control(self._tail([USER, ANSWER], 1)), later, "")
        except NoEnd:
            self.ends = Ends(later, later, "", begin_next=True)
        if dialect.tool_role:
            self.ends = self.ends._replace(call=self._find_call_end())

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Part]:
        """All messages, then the assistant's turn opened."""
        prepared = prepare(self.dialect, messages, tools)
        return _fill(prepared, self.pieces(prepared, True))

    def after_turn(self, messages: Sequence[Message]) -> list[Part]:
        """From the control token that ends an assistant's turn to the opening of the next."""
        runs = [list(run) for _, run in groupby(messages, key=lambda message: message.role == "tool")]
        if self.dialect.results_one_by_one:
            runs = [part for run in runs for part in ([[m] for m in run] if run[0].role == "tool" else [run])]
        elif len(runs) > 1:
            try:
                return self._glue(messages, True)
            except TemplateRefusal:
                pass  # Mistral's want an answer between a tool's result and the next question
        if not runs:
            return self._glue([], True)
        parts = self._glue(runs[0], len(runs) == 1)
        for i, run in enumerate(runs[1:], 2):
            parts += self._without_end(self._glue(run, i == len(runs)))
        return parts

    def pieces(self, prepared: Prepared, add_generation_prompt: bool) -> list[Piece]:
        """The rendering; TemplateRefusal unless all that must be written is."""
        text = self._template.render(prepared.messages, prepared.tools, add_generation_prompt=add_generation_prompt)
        pieces = split(text)
        written = [piece.slot for piece in pieces]
        for slot, whose in prepared.must:
            times = written.count(slot)
            if times == 0 or (times > 1 and whose.startswith("message")):
                raise TemplateRefusal(
                    f"the chat template {self._template.origin} writes {whose} of "
                    f"{len(prepared.messages)} messages {times} times: it must be written once"
                )
        return pieces

    def tail(self, messages: Sequence[Message], turn: int, tools: Sequence[ToolSchema] = ()) -> list[Piece]:
        """What is written behind the content and calls of message number ``turn``, up to the assistant's next turn."""
        return self._tail(messages, turn, tools, True)[1]

    # parts of it

    def _glue(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Part]:
        prepared, pieces = self._tail([USER, self._turn_before(messages), *messages], 1, (), add_generation_prompt)
        for i, piece in enumerate(pieces):
            if piece.slot is None and (at := self._find_end(piece.text)) is not None:
                return _fill(prepared, [Piece(piece.text[at:]), *pieces[i + 1 :]])
        raise NoEnd(pieces[0].text if pieces else "")

    def _turn_before(self, messages: Sequence[Message]) -> Message:
        """A turn of the assistant that ``messages`` can follow."""
        calls = [ToolCall(m.name, {"argument": _ARGUMENT}, m.call_id) for m in messages if m.role == "tool"]
        if not (calls and self.dialect.tool_role and self.dialect.calls):
            return ANSWER
        return calling(calls if self.dialect.parallel else calls[:1])

    def _tail(
        self, messages: Sequence[Message], turn: int, tools: Sequence[ToolSchema] = (), generation_prompt: bool = False
    ) -> tuple[Prepared, list[Piece]]:
        prepared = prepare(self.dialect, messages, tools)
        pieces = self.pieces(prepared, generation_prompt)
        assistants = [entry for entry in prepared.messages if entry["role"] == "assistant"]
        number = sum(message.role == "assistant" for message in messages[:turn])
        ours = _own_slots(assistants[number], prepared)
        last = max((i for i, piece in enumerate(pieces) if piece.slot in ours), default=None)
        if last is None:
            raise TemplateRefusal(f"the chat template {self._template.origin} leaves out an assistant's turn")
        return prepared, pieces[last + 1 :]

    def _find_call_end(self) -> str:
        """An end that is known, else the last special token of the turn (harmony ends calls by one of their own), else
        the first of the result."""
        call = ToolCall("f", {"argument": _ARGUMENT}, "000000000")
        result = Message("tool", "result", call.name, call.call_id)
        try:
            turn = _template_text(self._tail([USER, calling([call])], 1)[1])
            longer = _template_text(self._tail([USER, calling([call]), result], 1)[1])
        except TemplateRefusal:
            return self.ends.later
        if self._find_end(turn) is not None:
            return self.ends.later
        return next(iter([*reversed(self._specials(turn)), *self._specials(longer)]), self.ends.later)

    def _specials(self, text: str) -> list[str]:
        found = []
        while control := self._tokens.first_control(text):
            text = text[control[0] + len(control[1]) :]
            found += [control[1]] if self._tokens.is_special(control[1]) else []
        return found

    def _first_control(self, tail: tuple[Prepared, list[Piece]]) -> str:
        following = tail[1][0].text if tail[1] else ""
        control = self._tokens.first_control(following)
        if control is None or following[: control[0]].strip(" "):
            raise NoEnd(following)
        return control[1]

    def _find_end(self, text: str) -> int | None:
        found = [at for end in self.ends.tokens if (at := text.find(end)) >= 0]
        return min(found, default=None)

    def _without_end(self, parts: list[Part]) -> list[Part]:
        text = parts[0][0]
        end = next(end for end in self.ends.tokens if text.startswith(end))
        return [(text[len(end) :], True), *parts[1:]]


def calling(calls: Sequence[ToolCall]) -> Message:
    """A turn of the assistant that makes ``calls``."""
    return Message("assistant", ANSWER.content, tool_calls=list(calls))


def _own_slots(entry: dict[str, object], prepared: Prepared) -> set[int | None]:
    """The slots of an assistant's message that belong to no other."""
    content = entry.get("content")
    slots: set[int | None] = {slot_of(content)} if isinstance(content, str) else set()
    if "tool_calls" in entry and _ARGUMENT in prepared.slots.texts:
        slots.add(prepared.slots.texts.index(_ARGUMENT))
    return slots - {None}


def _template_text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _fill(prepared: Prepared, pieces: Iterable[Piece]) -> list[Part]:
    return [(prepared.slots.fill(piece), piece.slot is None) for piece in pieces]
