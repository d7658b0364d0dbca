"""Checks of row fields, and a split of generated rows that keeps held-out prompts out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_HELDOUT_SHARE = 4


def in_split(split: str, content: str) -> bool:
    """Whether a generated prompt with this content belongs to ``split``: one in four is held out, by hash,
    so that no seed or size of the two generators can make them overlap."""
    heldout = hashlib.sha256(content.encode()).digest()[0] % _HELDOUT_SHARE == 0
    return heldout == (split == "heldout")


def require(row: Mapping[str, Any], field: str, type_: type[T]) -> T:
    """``row[field]``; ValueError that names the field if it is missing, empty or of another type."""
    if field not in row:
        raise ValueError(f"field {field} is missing: expected a {type_.__name__}")
    value = row[field]
    if not isinstance(value, type_):
        raise ValueError(f"field {field} is a {type(value).__name__}, expected a {type_.__name__}")
    if not value and isinstance(value, (str, dict, list)):
        raise ValueError(f"field {field} is empty")
    return value
