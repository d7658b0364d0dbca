"""A record of metrics.jsonl as named numbers."""

from __future__ import annotations

from typing import Any


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """``{"step/seconds/training": 1.5, …}``: the kind, the keys on the way, the number; step, time and words are left out."""
    return {
        f"{record['kind']}/{name}": value for name, value in _flat(record, "") if name not in ("kind", "step", "time")
    }


def _flat(record: dict[str, Any], prefix: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found.append((prefix + key, float(value)))
    return found
