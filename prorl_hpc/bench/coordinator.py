"""``bench coordinator``: its parts, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prorl_hpc.bench import coupled, journal_size, latency, simulator_scale, throughput
from prorl_hpc.bench.figures import Figure
from prorl_hpc.messages.errors import ProrlError

PARTS = {
    "throughput": "no-op rollouts per second, against Ray's chains of three tasks",
    "latency": "from the end of a stage to the start of the next, at half of that throughput",
    "coupled": "three pools against one, and what the simulator predicts of both",
    "simulator": "4,096 nodes of 64 slots, a million rollouts, on one core",
    "memory": "growth of memory over 100,000 finished rollouts of 8k tokens",
}


def measure(parts: Sequence[str], quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """The figures of ``parts``; a part that breaks gives one that says why."""
    found: list[Figure] = []
    rate: float | None = None
    for part in (name for name in PARTS if name in parts):
        say(f"{part}: {PARTS[part]}")
        try:
            if part == "throughput":
                figures, rate = throughput.measure(quick, say)
            elif part == "latency":
                rate = rate or throughput.without_peer(quick, say)
                figures = latency.measure(quick, rate, say)
            elif part == "coupled":
                figures = coupled.measure(quick, say)
            elif part == "simulator":
                figures = simulator_scale.measure(quick, say)
            else:
                figures = journal_size.measure(quick, say)
        except ProrlError as error:
            say(f"{part} broke: {error}")
            figures = [Figure.not_taken(part, "", "", "", str(error).splitlines()[0])]
        found += figures
    return found
