"""How a rule about the values of one setting is written: a check, and what it allows in words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

Check = tuple[Callable[[Any], bool], str]

POSITIVE: Check = (lambda v: v > 0, "greater than 0")
AT_LEAST_1: Check = (lambda v: v >= 1, "at least 1")
NOT_NEGATIVE: Check = (lambda v: v >= 0, "0 or more")
FRACTION: Check = (lambda v: 0 < v <= 1, "greater than 0 and at most 1")
_ONE_OF = "one of "


def one_of(*allowed: str) -> Check:
    """A word of a few."""
    return (lambda v: v in allowed, _ONE_OF + ", ".join(allowed))


def words_of(text: str) -> list[str]:
    """Those that a rule made by ``one_of`` allows; empty for any other."""
    return text.removeprefix(_ONE_OF).split(", ") if text.startswith(_ONE_OF) else []


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """``; did you mean …?`` of the nearest, or ""."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
