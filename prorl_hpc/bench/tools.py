"""``bench tools``: what the tools of a sandbox take, each part in a sandbox of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from prorl_hpc.bench import cells, output_speed, shell_round_trips
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "floor": "`echo` and `ls` in a sandbox's shell, against a bare pseudo-terminal inside",
    "tmux": "the same against tmux",
    "swe_rex": "the same against SWE-ReX's local session",
    "ipython": "the cell `1+1`, in a kernel over ipc and in-process, against jupyter_client over TCP",
    "output": "10 and 40 MB of output of one command, against `cat` through a bare pseudo-terminal",
}
_MEASURES: dict[str, Callable[[int, Say], Coroutine[None, None, list[Figure]]]] = {
    "floor": shell_round_trips.against_floor,
    "tmux": shell_round_trips.against_tmux,
    "swe_rex": shell_round_trips.against_swe_rex,
    "ipython": cells.measure,
    "output": output_speed.measure,
}
CALLS, QUICK_CALLS = 200, 20


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    calls = QUICK_CALLS if quick else CALLS
    return measure_parts(PARTS, parts, say, lambda part: asyncio.run(_MEASURES[part](calls, say)))
