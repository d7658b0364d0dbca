"""A bench that is made of parts, each measured by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prorl_hpc.bench.figures import Figure
from prorl_hpc.messages.errors import ProrlError

Say = Callable[[str], None]
"""Tells people what goes on."""


def measure_parts(
    parts: Mapping[str, str], chosen: Sequence[str], say: Say, measure: Callable[[str], list[Figure]]
) -> list[Figure]:
    """``parts``: name → what it is, in the order in which they run. One that breaks gives a figure that says why,
    which holds nothing, and the others go on."""
    found: list[Figure] = []
    for part in (name for name in parts if name in chosen):
        say(f"{part}: {parts[part]}")
        try:
            found += measure(part)
        except ProrlError as error:
            say(f"{part} broke: {error}")
            found.append(Figure.not_taken(part, "", "", "", str(error).splitlines()[0]))
    return found
