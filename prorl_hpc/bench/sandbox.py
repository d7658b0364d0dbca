"""``bench sandbox``: how soon sandboxes are there, and whether they leave anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prorl_hpc.bench import sandbox_cycles, sandbox_starts
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "ready": "from the start of one sandbox to the first answer of its tools, against one container started by hand",
    "warm": "what a rollout waits for a sandbox out of the warm pool",
    "many": "50 sandboxes asked for at once, against one after the other",
    "cycles": "1,000 sandboxes left in disorder and stopped: nothing of them stays",
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    starts, count, rounds, cycles = (10, 10, 1, 40) if quick else (200, 50, 3, 1000)

    def part(name: str) -> list[Figure]:
        if name == "ready":
            return asyncio.run(sandbox_starts.ready(starts, say))
        if name == "warm":
            return asyncio.run(sandbox_starts.warm(starts, say))
        if name == "cycles":
            return asyncio.run(sandbox_cycles.cycles(cycles, say))
        return asyncio.run(sandbox_starts.many(count, rounds, say))

    return measure_parts(PARTS, parts, say, part)
