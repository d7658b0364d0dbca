"""JSON without the module json: its C halves alone.

The Python halves import regular expressions and enumerations, which takes longer than the start of Python, and every
sandbox waits for it. Same texts, same values, same errors (ValueError).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _refuse(value: object) -> Any:
    raise TypeError(f"a {type(value).__name__} is nothing that JSON knows")


class _Decoding:
    """What the C scanner asks its decoder for."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"-Infinity": float("-inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__
    memo: dict[str, str] = {}  # noqa: RUF012  (the scanner keeps its own)


def encode(value: Any) -> str:
    return "".join(_encoder(value, 0))


def decode(text: str) -> Any:
    """ValueError when ``text`` is not one JSON value, without white space around it."""
    try:
        value, end = _scan(text, 0)
    except StopIteration as error:
        raise ValueError(f"no JSON value at character {error.value}") from None
    if end != len(text):
        raise ValueError(f"more than one JSON value: character {end}")
    return value


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    # It asks for a make_scanner by its stub, and only reads these attributes.
    _scan = make_scanner(_Decoding)  # type: ignore[arg-type]
    _encoder = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
    decode(encode({"a": [1, 0.5, None, True, "é"]}))
except (ImportError, TypeError, AttributeError):  # another Python than CPython 3.11 to 3.14
    import json

    encode = json.JSONEncoder(separators=(",", ":")).encode  # type: ignore[assignment]
    decode = json.JSONDecoder().decode  # type: ignore[assignment]
