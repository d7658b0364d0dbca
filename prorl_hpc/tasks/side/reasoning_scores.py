"""Calls to the scorers of the package ``reasoning-gym``; each answer is scored in a process of its own (see host)."""

from __future__ import annotations

from typing import Any

_create: Any = None


def prepare() -> None:
    """Import the package, before the scorers' processes are forked."""
    global _create
    from reasoning_gym import create_dataset

    _create = create_dataset


def score(dataset: str, settings: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    """In [0, 1]."""
    return float(_create(dataset, size=1, seed=0, **settings).score_answer(answer=answer, entry=entry))
