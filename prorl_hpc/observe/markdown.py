"""Pieces of Markdown that the report is made of."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; pipes and line ends in cells would break it."""
    lines = [header, ("---",) * len(header), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
