"""``bench coordinator``: its parts, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from prorl_hpc.bench import coupled, journal_size, latency, simulator_scale, throughput
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "throughput": "no-op rollouts per second, against Ray's chains of three tasks",
    "latency": "from the end of a stage to the start of the next, at half of that throughput",
    "coupled": "three pools against one, and what the simulator predicts of both",
    "simulator": "4,096 nodes of 64 slots, a million rollouts, on one core",
    "memory": "growth of memory over 100,000 finished rollouts of 8k tokens",
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    rate: float | None = None

    def part(name: str) -> list[Figure]:
        nonlocal rate
        if name == "throughput":
            figures, rate = throughput.measure(quick, say)
            return figures
        if name == "latency":
            rate = rate or throughput.without_peer(quick, say)
            return latency.measure(quick, rate, say)
        if name == "coupled":
            return coupled.measure(quick, say)
        if name == "simulator":
            return simulator_scale.measure(quick, say)
        return journal_size.measure(quick, say)

    return measure_parts(PARTS, parts, say, part)
