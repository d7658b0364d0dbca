"""The tokenizer of a model directory, without torch and transformers; read when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_hpc.messages.errors import InferenceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ModelText:
    """Between ids and text. InferenceError if ``directory`` has no tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        file = self._directory / "tokenizer.json"
        if not file.is_file():
            raise InferenceError(f"the model directory {self._directory} has no tokenizer.json, which is needed here")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Control tokens in ``text`` become the tokens that they name; none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Control tokens are shown. Ids without a token are left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    @property
    def size(self) -> int:
        """Tokens that it has, those that were added included."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def special_tokens(self) -> list[str]:
        """The texts of its control tokens, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]
