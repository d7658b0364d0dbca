"""``bench sandbox``: how soon sandboxes are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prorl_hpc.bench import sandbox_starts
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "ready": "from the start of one sandbox to the first answer of its tools, against one container started by hand",
    "warm": "what a rollout waits for a sandbox out of the warm pool",
    "many": "50 sandboxes asked for at once, against one after the other",
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    starts, count, rounds = (10, 10, 1) if quick else (200, 50, 3)

    def part(name: str) -> list[Figure]:
        if name == "ready":
            return asyncio.run(sandbox_starts.ready(starts, say))
        if name == "warm":
            return asyncio.run(sandbox_starts.warm(starts, say))
        return asyncio.run(sandbox_starts.many(count, rounds, say))

    return measure_parts(PARTS, parts, say, part)
