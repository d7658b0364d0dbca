"""The built-in problems of the task ``solve``: sums, files to read, and files to make."""

from __future__ import annotations

import random
from typing import Any

_WORDS = [
    "apple",
    "bench",
    "cloud",
    "drum",
    "engine",
    "forest",
    "glove",
    "harbor",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "meadow",
    "needle",
    "orchard",
    "pillow",
]


def draw_row(source: random.Random, number: int) -> dict[str, Any]:
    """One row without its id; its kind goes by ``number`` in turn."""
    return (_sum, _read, _make)[number % 3](source)


def _sum(source: random.Random) -> dict[str, Any]:
    a, b, c = source.randint(12, 99), source.randint(12, 99), source.randint(100, 999)
    return {"prompt": f"What is {a} * {b} + {c}?", "answer": str(a * b + c), "compare": "numeric"}


def _read(source: random.Random) -> dict[str, Any]:
    rows = [(source.choice(_WORDS), source.randint(1, 99)) for _ in range(source.randint(6, 14))]
    word = source.choice(rows)[0]
    name = f"stock-{source.randint(100, 999)}.csv"
    total = sum(count for item, count in rows if item == word)
    return {
        "prompt": f"{name} has lines of an item and a count. What is the sum of the counts of {word}?",
        "files": {name: "".join(f"{item},{count}\n" for item, count in rows)},
        "answer": str(total),
        "compare": "numeric",
    }


def _make(source: random.Random) -> dict[str, Any]:
    words = source.sample(_WORDS, source.randint(5, 10))
    name = f"words-{source.randint(100, 999)}.txt"
    return {
        "prompt": f"Write the lines of {name} into sorted.txt, in alphabetical order.",
        "files": {name: "\n".join(words) + "\n"},
        "check": "cmp sorted.txt expected.txt",
        "check_files": {"expected.txt": "\n".join(sorted(words)) + "\n"},
        "fresh": True,
        "outputs": ["sorted.txt"],
    }
