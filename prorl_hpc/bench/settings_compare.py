"""Settings of two runs, held against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MOST_CHARACTERS = 120
"""Of a setting's value."""


def flat(settings: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all leaves."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def settings_that_differ(first: str, other: str) -> dict[str, tuple[str, str]]:
    """Of settings in Hydra's words, one a line: by the names of those that differ, the value of each side."""
    sides = [dict(_named(word) for word in words.split("\n") if word) for words in (first, other)]
    names = sorted(name for name in sides[0] | sides[1] if sides[0].get(name) != sides[1].get(name))
    return {name: (_short(sides[0].get(name)), _short(sides[1].get(name))) for name in names}


def _named(word: str) -> tuple[str, str]:
    """A setting in Hydra's words; one that is taken away has no value."""
    name, _, value = word.lstrip("+").partition("=")
    return name, value


def _short(value: str | None) -> str:
    if value is None:
        return "not given"
    return value if len(value) <= _MOST_CHARACTERS else f"{value[: _MOST_CHARACTERS - 1]}…"
