"""The simulator at the size it is meant for: 4,096 nodes of 64 slots, a million rollouts, on one core.

``python -m prorl_hpc.bench.simulator_scale ROLLOUTS CORE`` is the process that is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from prorl_hpc.bench.figures import Figure
from prorl_hpc.messages.errors import RunError

NODES, SLOTS, ROLLOUTS = 4096, 64, 1_000_000
GOAL_S, GOAL_GIB = 120.0, 4.0
_TIMEOUT_S = 900.0


def measure(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    rollouts = ROLLOUTS // 10 if quick else ROLLOUTS
    core = max(os.sched_getaffinity(0))
    say(f"simulating {NODES} nodes of {SLOTS} slots, {rollouts} rollouts, on core {core}")
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "prorl_hpc.bench.simulator_scale", str(rollouts), str(core)], start_new_session=True
    )
    try:
        peak_gib = _ended(child, began + _TIMEOUT_S) / 2**20
    finally:
        if child.returncode is None:
            child.kill()
            child.wait()
    wall_s = time.monotonic() - began
    detail = f"{NODES} nodes of {SLOTS} slots, {rollouts} rollouts, one core, start of the process included"
    if quick:
        detail += f"; quick: a tenth of the {ROLLOUTS} that the goal is about"
    return [
        Figure.below("simulation, wall time", wall_s, GOAL_S, "s", "the goal", detail),
        Figure.below("simulation, peak memory", peak_gib, GOAL_GIB, "GiB", "the goal", detail),
    ]


def _ended(child: subprocess.Popen[bytes], deadline: float) -> int:
    """Its peak resident memory, KiB. RunError if it fails or takes too long."""
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode != 0:
                raise RunError(f"the simulation ended with exit code {child.returncode}")
            return usage.ru_maxrss
        time.sleep(0.05)
    raise RunError(f"the simulation did not end within {_TIMEOUT_S:.0f} s")


def main() -> None:
    from prorl_hpc.bench.simulation import simulate
    from prorl_hpc.bench.simulation_config import SimulationConfig

    rollouts, core = int(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    result = simulate(SimulationConfig(rollouts=rollouts, nodes=NODES, slots=SLOTS, servers=NODES // 8, plot=""))
    if result.statuses["done"] != rollouts:
        sys.exit(f"the simulation ended with {result.statuses}")


if __name__ == "__main__":
    main()
