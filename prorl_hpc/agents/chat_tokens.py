"""A model's tokenizer as chats need it: text stays text, and only the template's own pieces become control tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from prorl_hpc.messages.errors import ConfigError

_LONG_CHARS = 10_000
_OWN = "\ue002"
"""Begins a token of our own."""


class ChatTokens:
    """``template_text`` says which of the tokenizer's added tokens are control tokens besides the special ones: those
    that it contains, such as <tool_call>, which many tokenizers do not call special."""

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control: dict[str, tuple[int, AddedToken]] = {
            token.content: (i, token)
            for i, token in added.items()
            if token.special or (token.content.strip() and token.content in template_text)
        }
        """Control tokens by their text."""
        splitter = tokenizer.pre_tokenizer
        self._first_is_different = splitter is not None and b'"prepend_scheme":"first"' in splitter.__getstate__()
        # Whoever is called special is not looked for in text.
        tokenizer.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=token.normalized, lstrip=token.lstrip, rstrip=token.rstrip)
                for text, (i, token) in self.control.items()
                if i not in self._special_ids
            ]
        )
        longest_first = sorted(self.control, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        tokenizer.encode_special_tokens = True

    def encode(self, parts: Iterable[tuple[str, bool]], *, at_start: bool) -> list[int]:
        """Ids of the texts one after another. Second of each: whether it is the template's, in which control tokens
        count. ``at_start``: nothing comes before them."""
        ids: list[int] = []
        text = ""
        strip_left = False

        def flush(strip_right: bool) -> None:
            nonlocal text
            # Some control tokens take the white space beside them (AddedToken.lstrip, rstrip).
            run = text.lstrip() if strip_left else text
            ids.extend(self.encode_text(run.rstrip() if strip_right else run, at_start=at_start and not ids))
            text = ""

        for part, is_template in parts:
            if not is_template or self._pattern is None:
                text += part
                continue
            for run in self._pattern.split(part):
                if run in self.control:
                    token_id, token = self.control[run]
                    flush(token.lstrip)
                    ids.append(token_id)
                    strip_left = token.rstrip
                else:
                    text += run
        flush(False)
        return ids

    def encode_text(self, text: str, *, at_start: bool = False) -> list[int]:
        """Ids of plain text: what looks like a control token stays text. Some tokenizers write the beginning of a text
        (``at_start``) otherwise than what follows a token."""
        if not text:
            return []
        if at_start or not self._first_is_different:
            return self._ids(text)
        return self._ids(self._something_before + text)[1:]

    def _ids(self, text: str) -> list[int]:
        if len(text) < _LONG_CHARS:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        # ``encode`` holds the interpreter's lock, so that a thread would not help.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def encode_whole(self, text: str) -> list[int]:
        """Ids of ``text`` with control tokens looked for everywhere, as engines encode a rendered chat."""
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
        """Text of ``ids``; without the special tokens unless asked for."""
        kept = list(ids) if control_tokens else [i for i in ids if i not in self._special_ids]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def is_special(self, text: str) -> bool:
        """Whether the tokenizer itself calls this control token special."""
        return self.control[text][0] in self._special_ids

    def first_control(self, text: str) -> tuple[int, str] | None:
        """Where the first control token of ``text`` is, and which."""
        match = self._pattern.search(text) if self._pattern else None
        return (match.start(), match[0]) if match else None

    @cached_property
    def _something_before(self) -> str:
        # A token that no text contains, for what follows to be encoded as the middle of a text; its id is dropped.
        text = f"{_OWN}{secrets.token_hex(8)}{_OWN}"
        self._tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
        return text


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """From tokenizer.json; ConfigError if it is missing or does not load."""
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"the model directory {model_dir} has no tokenizer.json: save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} does not load: {error}") from error
