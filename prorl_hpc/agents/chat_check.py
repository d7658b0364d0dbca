"""Proof, when a model is loaded, that its chat template can be extended; or an error that says which part breaks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from prorl_hpc.agents.chat_dialect import Dialect
from prorl_hpc.agents.chat_messages import Prepared, prepare
from prorl_hpc.agents.chat_slots import Piece, place_of, readable, slot_of
from prorl_hpc.agents.chat_template import ChatTemplate, TemplateRefusal
from prorl_hpc.agents.chat_thinking import without_thought
from prorl_hpc.agents.chat_tokens import ChatTokens
from prorl_hpc.agents.chat_writer import ChatWriter, NoEnd, Part, calling
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema

log = logging.getLogger(__name__)

_SYSTEM = Message("system", "Word 0 is here.")
_PARAMETERS = {"type": "object", "properties": {"argument": {"type": "string", "description": "What it is."}}}
_TOOLS = [
    ToolSchema("look", "Looks at it.", {**_PARAMETERS, "required": ["argument"]}),
    ToolSchema("find", "Finds it.", _PARAMETERS),
]
_ARGUMENTS = {"argument": "\ue003value"}
_CALLS = [ToolCall("look", _ARGUMENTS, "000000001"), ToolCall("find", _ARGUMENTS, "000000002")]
_RESULTS = [Message("tool", f"Word {i} is there.", call.name, call.call_id) for i, call in enumerate(_CALLS)]


def check_template(template: ChatTemplate, dialect: Dialect, tokens: ChatTokens, name: str) -> ChatWriter:
    """A writer whose conversations can be extended: ConfigError else. ``name``: the model, for messages."""
    part = ""
    try:
        writer = ChatWriter(template, dialect, tokens)
        _Check(writer, template, tokens, ()).run()
        part = " with tools"
        _Check(writer, template, tokens, _TOOLS).run()
    except NoEnd as error:
        raise _refusal(
            name,
            part,
            f"it ends an assistant turn with {readable(str(error))[:30]!r}, which does not begin with a special token of "
            "the tokenizer, so that the model cannot end its turn",
        ) from error
    except _Broken as error:
        raise _refusal(name, part, str(error)) from error
    except TemplateRefusal as error:
        raise _refusal(name, part, readable(str(error))) from error
    _warn_of_rewriting(writer, template, name)
    return writer


def _refusal(name: str, part: str, what: str) -> ConfigError:
    return ConfigError(
        f"the chat template of {name} cannot be extended message by message{part}: {what}. Use a template that "
        "writes each message the same way whatever comes after it (chat_template.jinja in the model directory)"
    )


class _Broken(Exception):
    """Which part breaks, in words."""


class _Check:
    """With and without tools: each conversation is compared with the longer ones that begin with it."""

    def __init__(self, writer: ChatWriter, template: ChatTemplate, tokens: ChatTokens, tools: Sequence[ToolSchema]):
        self._writer, self._template, self._tokens = writer, template, tokens
        dialect = writer.dialect
        # A template that moves them is asked for the rest alone; that what follows does not have them is seen so too.
        self._tools: Sequence[ToolSchema] = () if dialect.moves_prompt else tools
        self._first = ([] if dialect.moves_prompt else [_SYSTEM]) + [Message("user", "Word 1 is here.")]
        self._with_calls = bool(tools) and dialect.tool_role
        self._all_tools = tools

    def run(self) -> None:
        follow = [Message("user", "Word 3 is here.")]
        answer = Message("assistant", "Word 2 is here.")
        self._check_growth(answer, follow, later_turns=True)
        if self._writer.dialect.reasoning_keys:
            # Whether it keeps earlier thought is all the same: what was generated stays.
            self._check_tails(replace(answer, reasoning="Word 6 is here."), follow, later_turns=True)
        if self._with_calls:
            later = not self._writer.dialect.forgets_earlier_calls
            several = 2 if self._writer.dialect.parallel else 1
            for calls, results in ((_CALLS[:1], _RESULTS[:1]), (_CALLS[:several], _RESULTS)):
                if len(results) == 1 or not self._writer.dialect.results_one_by_one:
                    self._check_growth(calling(calls), results, later_turns=later)
                self._writer.after_turn(results)
            self._writer.after_turn([*_RESULTS, *follow])
        self._check_encoding()

    def _check_growth(self, turn: Message, follow: Sequence[Message], *, later_turns: bool) -> None:
        first = [*self._first]
        prompt = self._text(first, True)
        lead = self._lead([*first, turn], False)
        if not without_thought(lead).startswith(without_thought(prompt).rstrip()):
            raise _Broken(f"the generation prompt is not how it begins an assistant turn ({_difference(prompt, lead)})")
        once = [*first, turn, *follow]
        longer = self._lead(once, True)
        if without_thought(longer) != without_thought(lead):
            what = f"adding message {len(once)} ({follow[0].role}) changes what it wrote before it"
            raise _Broken(f"{what} ({_difference(lead, longer)})")
        self._check_tails(turn, follow, later_turns=later_turns)

    def _check_tails(self, turn: Message, follow: Sequence[Message], *, later_turns: bool) -> None:
        once = [*self._first, turn, *follow]
        tails = [self._tail(once, len(self._first))]
        if later_turns:
            tails.append(self._tail([*once, turn, *follow], len(once)))
        own = self._tail_alone(turn, follow)
        for tail in tails:
            if tail != own:
                raise _Broken(f"it goes on differently in later turns ({_difference(own, tail)})")

    def _check_encoding(self) -> None:
        """The ids of the pieces must be those of the whole text, or trained models would see another prompt."""
        conversation = [*self._first, Message("assistant", "Word 2 is here."), Message("user", "Word 3 is here.")]
        self._compare_ids(self._writer.prompt(self._first, self._all_tools))
        self._compare_ids(self._writer.prompt(conversation, self._tools))

    def _compare_ids(self, parts: Sequence[Part]) -> None:
        pieces = self._tokens.encode(parts, at_start=True)
        whole = self._tokens.encode_whole("".join(text for text, _ in parts))
        if pieces != whole:
            at = next((i for i, (a, b) in enumerate(zip(pieces, whole, strict=False)) if a != b), -1)
            raise _Broken(
                f"its pieces do not encode to the ids of the whole text, from token {at} on "
                f"({self._tokens.decode(pieces[at : at + 4], control_tokens=True)!r} instead of "
                f"{self._tokens.decode(whole[at : at + 4], control_tokens=True)!r})"
            )

    # renderings

    def _prepared(self, messages: Sequence[Message]) -> Prepared:
        return prepare(self._writer.dialect, messages, self._tools)

    def _text(self, messages: Sequence[Message], opened: bool) -> str:
        """With placeholders."""
        prepared = self._prepared(messages)
        self._writer.pieces(prepared, opened)
        return self._template.render(prepared.messages, prepared.tools, add_generation_prompt=opened)

    def _lead(self, messages: Sequence[Message], opened: bool) -> str:
        """What is written before the first assistant's turn, up to its content or call."""
        prepared = self._prepared(messages)
        text = self._text(messages, opened)
        turn = next(entry for entry in prepared.messages if entry["role"] == "assistant")
        slots = [slot_of(turn["content"] or ""), *_slots_of_text(prepared, _ARGUMENTS["argument"])]
        found = [at for slot in slots if slot is not None and (at := place_of(text, slot)) is not None]
        return text[: min(found, default=len(text))]

    def _tail(self, messages: Sequence[Message], turn: int) -> str:
        return _flat(self._writer.tail(messages, turn, self._tools))

    def _tail_alone(self, turn: Message, follow: Sequence[Message]) -> str:
        return _flat(self._writer.tail([Message("user", "Word 1 is here."), turn, *follow], 1))


def _warn_of_rewriting(writer: ChatWriter, template: ChatTemplate, name: str) -> None:
    """Some templates drop or add to a turn once it is over (thoughts, a last eos). Conversations here keep what was
    generated, so whoever serves the trained model by its template should know."""
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    texts = []
    for k in range(1, len(messages) + 1):
        prepared = prepare(writer.dialect, messages[:k])
        texts.append(template.render(prepared.messages, add_generation_prompt=False))
    for shorter, longer in pairwise(texts):
        if not longer.startswith(shorter):
            log.warning(
                "the chat template of %s writes a conversation that goes on otherwise than one that has ended "
                "(%s); rollouts keep what the model wrote",
                name,
                _difference(shorter, longer),
            )
            return


def _slots_of_text(prepared: Prepared, text: str) -> list[int]:
    return [i for i, placed in enumerate(prepared.slots.texts) if placed == text]


def _flat(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text or f"\ue000{piece.escapes}" for piece in pieces)


def _difference(expected: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    shown = [readable(text[max(0, at - 12) : at + 30]).replace("\ue000", "{text}") for text in (expected, got)]
    return f"expected {shown[0]!r}, got {shown[1]!r}"
