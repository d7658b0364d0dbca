"""``bench tools``: what the tools of a sandbox take, each part in a sandbox of its own, in the order in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prorl_hpc.bench import output_speed, shell_round_trips
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.sandbox_bed import SandboxBed
from prorl_hpc.messages.errors import ProrlError

Say = Callable[[str], None]

PARTS = {
    "floor": "`echo` and `ls` in a sandbox's shell, against a bare pseudo-terminal inside",
    "tmux": "the same against tmux",
    "swe_rex": "the same against SWE-ReX's local session",
    "output": "10 and 40 MB of output of one command, against `cat` through a bare pseudo-terminal",
}
_MEASURES: dict[str, Callable[[SandboxBed, int, Say], Awaitable[list[Figure]]]] = {
    "floor": shell_round_trips.against_floor,
    "tmux": shell_round_trips.against_tmux,
    "swe_rex": shell_round_trips.against_swe_rex,
    "output": output_speed.measure,
}
CALLS, QUICK_CALLS = 200, 20


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    """The figures of ``parts``; a part that breaks gives one that says why, which holds nothing."""
    found: list[Figure] = []
    for part in (name for name in PARTS if name in parts):
        say(f"{part}: {PARTS[part]}")
        try:
            found += asyncio.run(_part(part, QUICK_CALLS if quick else CALLS, say))
        except ProrlError as error:
            say(f"{part} broke: {error}")
            found.append(Figure.not_taken(part, "", "", "", str(error).splitlines()[0]))
    return found


async def _part(part: str, calls: int, say: Say) -> list[Figure]:
    async with SandboxBed.open() as bed:
        return await _MEASURES[part](bed, calls, say)
