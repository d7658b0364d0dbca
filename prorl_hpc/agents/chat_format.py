"""How a model writes a chat as token ids, so that it can be extended message by message.

A conversation's ids are: the first prompt, then for each turn the ids that the engine returned, the
template's *glue* (end of turn, start of the next), the new message, and the opening of the assistant's
next turn. That equals the template's own rendering only if the template never rewrites what it wrote
before an assistant's answer; ``ChatFormat.open`` proves it on a sample or refuses the model.

Text of messages is encoded with control tokens disabled: a tool that prints ``<|im_end|>`` does not end
a turn. Only the template's own pieces become control tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from prorl_hpc.agents.chat_template import ChatTemplate, read_json_file
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message, ToolSchema

log = logging.getLogger(__name__)

_SAMPLE_ROLES = ("system", "user", "assistant", "user", "assistant", "user")
# Private-use characters: a template neither trims nor splits them, and no tokenizer knows them as tokens.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class Piece(NamedTuple):
    """Text of the template (``message`` None), or the place of message number ``message``."""

    text: str
    message: int | None


class ChatFormat:
    """Tokenizer and chat template of one model directory. Immutable, shared by all conversations."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, extra_eos_ids: Iterable[int], name: str) -> None:
        """``name``: the model, for messages. Raises ConfigError if the template cannot be extended."""
        self.name = name
        self._tokenizer = tokenizer
        self._template = template
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._special: dict[str, tuple[int, AddedToken]] = {
            token.content: (i, token) for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        )
        self._layout = lru_cache(maxsize=64)(self._make_layout)
        self._check_extension()
        self.end_of_turn_id = self._find_end_of_turn()
        self._trims = self._template_trims()
        self._check_encoding()
        tokenizer.encode_special_tokens = True
        eos = self._special.get(template.eos_token or "")
        self.stop_token_ids: list[int] = sorted({self.end_of_turn_id, *extra_eos_ids, *([eos[0]] if eos else [])})
        """Ids that end an assistant's turn: the template's end of turn and the model's eos."""

    @classmethod
    def open(cls, model_dir: Path | str, *, thinking: str = "auto") -> ChatFormat:
        """Load from a Hugging Face directory; ConfigError says what is missing or which part breaks. ``thinking``:
        auto, on or off, as model.thinking."""
        model_dir = Path(model_dir)
        if not model_dir.is_dir():
            raise ConfigError(f"model.path={model_dir} is not a directory: give a Hugging Face model directory")
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"the model directory {model_dir} has no tokenizer.json: save the model's fast tokenizer there "
                "(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} does not load: {error}") from error
        return cls(tokenizer, ChatTemplate.open(model_dir), _eos_ids(model_dir), str(model_dir))

    # what conversations use

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """The conversation's first ids: all messages, then the assistant's turn opened."""
        pieces = self._layout(tuple(message.role for message in messages), True)
        return self._encode(pieces, messages)

    def extension(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """The ids from the end of an assistant turn to the opening of the next: what closes the turn (all of
        it unless ``last_id``, the turn's last id, already is the end of turn), ``messages``, the opening."""
        roles = ("system", "user", "assistant", *(message.role for message in messages))
        pieces = self._layout(roles, True)
        start = next(i for i, piece in enumerate(pieces) if piece.message == 2) + 1
        ids = self._encode(pieces[start:], [Message(role, "") for role in roles[:3]] + list(messages))
        return ids[1:] if last_id == self.end_of_turn_id else ids

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
        """Text of ``ids``; without the control tokens unless asked for."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not control_tokens)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text: what looks like a control token stays text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    # how the template is taken apart

    def _make_layout(self, roles: tuple[str, ...], add_generation_prompt: bool) -> list[Piece]:
        """The rendering of messages with these roles as pieces; no message's content reaches the template."""
        messages = [{"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(roles)]
        rendered = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        parts = _PLACEHOLDER.split(rendered)
        pieces = [Piece(text, None) if i % 2 == 0 else Piece("", int(text)) for i, text in enumerate(parts)]
        found = [piece.message for piece in pieces if piece.message is not None]
        if found != list(range(len(roles))):
            raise self._refusal(
                f"of {len(roles)} messages ({', '.join(roles)}) it writes numbers {found}: each must be written once"
            )
        return [piece for piece in pieces if piece.text or piece.message is not None]

    def _encode(self, pieces: Sequence[Piece], messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        text = ""
        strip_left = False

        def flush(strip_right: bool) -> None:
            nonlocal text
            # Some control tokens take the white space beside them (AddedToken.lstrip, rstrip).
            run = text.lstrip() if strip_left else text
            ids.extend(self.encode_text(run.rstrip() if strip_right else run))
            text = ""

        for piece in pieces:
            if piece.message is not None:
                content = messages[piece.message].content
                text += content.strip() if self._trims else content
                continue
            for part in self._special_pattern.split(piece.text) if self._special_pattern else [piece.text]:
                if part in self._special:
                    token_id, token = self._special[part]
                    flush(token.lstrip)
                    ids.append(token_id)
                    strip_left = token.rstrip
                else:
                    text += part
        flush(False)
        return ids

    # checks at load

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self.name} cannot be extended message by message: {what}. Use a template that "
            "writes each message the same way whatever comes after it (chat_template.jinja in the model directory)"
        )

    def _check_extension(self) -> None:
        """What is written up to an assistant's answer must be the beginning of every longer conversation, and
        each turn must be closed and followed alike."""
        followed: list[str] = []
        for k in (2, 4):
            answered = self._sample(k, True) + f"{_OPEN}{k}{_CLOSE}"
            longer = self._sample(k + 2, True)
            if not longer.startswith(answered):
                turn = self._sample(k + 1, False)
                if turn.startswith(answered):
                    what = f"adding message {k + 2} ({_SAMPLE_ROLES[k + 1]}) changes what it wrote before it"
                    raise self._refusal(f"{what} ({_first_difference(answered, longer)})")
                what = "the generation prompt is not how it begins an assistant turn"
                raise self._refusal(f"{what} ({_first_difference(answered, turn)})")
            followed.append(_PLACEHOLDER.sub(_OPEN, longer.removeprefix(answered)))
        if followed[0] != followed[1]:
            raise self._refusal(f"it goes on differently in later turns ({_first_difference(*followed)})")
        self._warn_of_rewriting()

    def _warn_of_rewriting(self) -> None:
        """Some templates drop or add to a turn once it is over (empty thoughts, a last eos). Conversations here
        keep what was generated, so whoever serves the trained model by its template should know."""
        for k in range(2, len(_SAMPLE_ROLES)):
            shorter, longer = self._sample(k, False), self._sample(k + 1, False)
            if not longer.startswith(shorter):
                log.warning(
                    "the chat template of %s writes a conversation that goes on otherwise than one that has ended "
                    "(%s); rollouts keep what the model wrote",
                    self.name,
                    _first_difference(shorter, longer),
                )
                return

    def _sample(self, k: int, add_generation_prompt: bool) -> str:
        """The first ``k`` sample messages as the template writes them."""
        messages = [{"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(_SAMPLE_ROLES[:k])]
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _find_end_of_turn(self) -> int:
        pieces = self._layout(_SAMPLE_ROLES[:4], True)
        closing = pieces[next(i for i, piece in enumerate(pieces) if piece.message == 2) + 1].text
        match = self._special_pattern.match(closing) if self._special_pattern else None
        if match is None:
            raise self._refusal(
                f"it ends an assistant turn with {closing[:30]!r}, which does not begin with a special token of the "
                "tokenizer, so that the model cannot end its turn"
            )
        return self._special[match[0]][0]

    def _template_trims(self) -> bool:
        """Whether the template strips white space around contents, as some do."""
        sample = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f" {_OPEN} "},
            {"role": "assistant", "content": "a"},
        ]
        return f" {_OPEN} " not in self._template.render(sample, add_generation_prompt=False)

    def _check_encoding(self) -> None:
        """The ids of the pieces must be those of the whole text, or trained models would see another prompt."""
        words = [Message(role, f"Word {i} is here.") for i, role in enumerate(_SAMPLE_ROLES)]
        rendered = self._template.render(
            [{"role": word.role, "content": word.content} for word in words], add_generation_prompt=True
        )
        self._tokenizer.encode_special_tokens = False
        whole = list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)
        self._tokenizer.encode_special_tokens = True
        pieces = self.first_prompt(words)
        if pieces != whole:
            at = next((i for i, (a, b) in enumerate(zip(pieces, whole, strict=False)) if a != b), -1)
            raise self._refusal(
                f"its pieces do not encode to the ids of the whole text, from token {at} on "
                f"({self.decode(pieces[at : at + 4], control_tokens=True)!r} instead of "
                f"{self.decode(whole[at : at + 4], control_tokens=True)!r})"
            )


def _first_difference(expected: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    readable = [_PLACEHOLDER.sub(r"{message \1}", text[max(0, at - 12) : at + 30]) for text in (expected, got)]
    return f"expected {readable[0]!r}, got {readable[1]!r}"


def _eos_ids(model_dir: Path) -> list[int]:
    """eos ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json_file(model_dir / name).get("eos_token_id")
        if isinstance(eos, int):
            return [eos]
        if isinstance(eos, list) and all(isinstance(i, int) for i in eos):
            return list(eos)
    return []
