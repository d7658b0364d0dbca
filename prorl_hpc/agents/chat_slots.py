"""Text that a chat template must not see: rendered as placeholders, which stand for it until it is encoded.

A template is a program over the conversation. Were it given what a tool printed, that text could look like one of its
control tokens, and trimming, JSON and string tests would act on it in ways that differ from turn to turn. So a template
sees a placeholder in a text's place; white space around the text stays outside of it, where trimming finds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Private-use characters: a template neither trims nor splits them, and no tokenizer knows them as tokens. Nine
# characters in all, the length that Mistral's templates demand of a call's id.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]{{7}})([ja]*){_CLOSE}")
_JSON_SCHEMA_WORDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null", "function"})
"""Values that templates compare with."""
_JSON_SCHEMA_KEYS = frozenset(
    [
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "properties",
        "required",
        "items",
        "enum",
        "default",
        "anyOf",
        "oneOf",
        "allOf",
        "format",
        "title",
        "nullable",
        "additionalProperties",
        "minimum",
        "maximum",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "const",
        "return",
        "$defs",
        "$ref",
    ]
)


class Piece(NamedTuple):
    """Text of the template (``slot`` None), or the place of the text number ``slot``. ``escapes``: how often it is to be
    escaped as part of a JSON string, ``j`` each time, or ``a`` in ASCII."""

    text: str
    slot: int | None = None
    escapes: str = ""


class Slots:
    """The texts of one rendering, in order of their numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._shared: dict[str, str] = {}

    def place(self, text: str) -> str:
        """What to give the template for ``text``: white space as it is, a new placeholder for the rest."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        self.texts.append(core)
        return f"{text[:start]}{_OPEN}{len(self.texts) - 1:07d}{_CLOSE}{text[start + len(core) :]}"

    def place_name(self, text: str) -> str:
        """As ``place``, but equal texts have the same placeholder: a template compares names and ids."""
        if text not in self._shared:
            self._shared[text] = self.place(text)
        return self._shared[text]

    def place_value(self, value: Any, *, schema: bool = False) -> Any:
        """``value`` (as JSON has it) with all its texts placed. ``schema``: it is a JSON schema, whose own words stay."""
        if isinstance(value, str):
            return self.place_name(value)
        if isinstance(value, list | tuple):
            return [self.place_value(item, schema=schema) for item in value]
        if isinstance(value, dict):
            return {self._key(key, schema): self._field(key, item, schema) for key, item in value.items()}
        return value

    def _key(self, key: str, schema: bool) -> str:
        return key if schema and key in _JSON_SCHEMA_KEYS else self.place_name(key)

    def _field(self, key: str, value: Any, schema: bool) -> Any:
        if schema and key == "type" and isinstance(value, str) and value in _JSON_SCHEMA_WORDS:
            return value
        if schema and key == "type" and isinstance(value, list) and _JSON_SCHEMA_WORDS.issuperset(map(str, value)):
            return list(value)
        if schema and key in ("properties", "$defs") and isinstance(value, dict):
            return {self.place_name(name): self.place_value(item, schema=True) for name, item in value.items()}
        if key in ("enum", "default", "const", "examples"):
            return self.place_value(value)
        return self.place_value(value, schema=schema)

    def fill(self, piece: Piece) -> str:
        """The text of ``piece``."""
        if piece.slot is None:
            return piece.text
        text = self.texts[piece.slot]
        for escape in piece.escapes:
            text = json.dumps(text, ensure_ascii=escape == "a")[1:-1]
        return text


def slot_of(placed: str) -> int | None:
    """The number in what ``Slots.place`` returned; None if that was white space alone."""
    match = _PLACEHOLDER.search(placed)
    return int(match[1]) if match else None


def place_of(rendered: str, slot: int) -> int | None:
    """Where the text number ``slot`` is first written."""
    at = re.search(f"{_OPEN}{slot:07d}[ja]*{_CLOSE}", rendered)
    return at.start() if at else None


def split(rendered: str) -> list[Piece]:
    """A rendering as pieces, none of them empty."""
    parts = _PLACEHOLDER.split(rendered)
    pieces: list[Piece] = []
    for i in range(0, len(parts), 3):
        if parts[i]:
            pieces.append(Piece(parts[i]))
        if i + 1 < len(parts):
            pieces.append(Piece("", int(parts[i + 1]), parts[i + 2]))
    return pieces


def readable(text: str) -> str:
    """A rendering for people."""
    return _PLACEHOLDER.sub(r"{text \1}", text).replace("{text 000000", "{text ")


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as transformers' ``tojson`` writes it, except that placeholders note that they are within a JSON string."""
    text = json.dumps(value, ensure_ascii=False, **options)
    if not ensure_ascii:
        return _PLACEHOLDER.sub(rf"{_OPEN}\1\2j{_CLOSE}", text)
    parts = _PLACEHOLDER.split(text)
    return "".join(_ascii_parts(parts))


def _ascii_parts(parts: list[str]) -> Iterable[str]:
    for i in range(0, len(parts), 3):
        yield re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], parts[i])
        if i + 1 < len(parts):
            yield f"{_OPEN}{parts[i + 1]}{parts[i + 2]}a{_CLOSE}"
