"""What a rollout costs the coordinator when it is saturated: its CPU time, with nothing else in the way.

At a few rollouts a second the coordinator wakes up for every message by itself; with thousands it takes what has come
in one go, so that a cost measured at low rates says little of its limit. Here no-op rollouts whose trajectories are as long as a
series' are ordered by the thousand, from workers that start no sandbox.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from prorl_hpc.bench.load_client import Form, Load, LoadRecord
from prorl_hpc.bench.scaling_simulated import Coordinator
from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.bench.throughput import noop_pools
from prorl_hpc.messages.errors import RunError

_WORKERS = 2
_MESSAGES = 6
"""Of a rollout at the coordinator's door to the workers: three stages, each ordered and reported."""


def saturated_coordinator(
    tokens: int, heartbeat_s: float, say: Callable[[str], None], rollouts: int = 6000
) -> Coordinator:
    """``tokens``: of a trajectory. The heartbeat of an agent, and its answer, cost as much as two messages of a rollout, all
    that else is done for it counted in. RunError if it cannot be measured here."""
    say(f"saturating a coordinator with {rollouts:,} rollouts of {tokens} tokens, for its cost")
    with Testbed.open(noop_pools(), workers=_WORKERS) as bed:
        bed.start()
        process = psutil.Process(bed.processes.pid("coordinator"))
        before = _cpu_s(process)
        bed.start_client("client-0", Load(rollouts, Form.STREAM, rows=[{"tokens": float(tokens)}]))
        bed.wait_client("client-0", timeout_s=60 + rollouts / 50)
        used_s = _cpu_s(process) - before
        record = LoadRecord.read(bed.run, "client-0")
        bed.stop()
    if record.done != rollouts:
        raise RunError(f"{rollouts} rollouts were ordered of the coordinator, these came: {record.statuses}")
    rollout_s = used_s / rollouts
    agent_s = rollout_s * 2 / _MESSAGES / heartbeat_s
    per_s = rollouts / (record.ended - record.began)
    how = (
        f"{1000 * rollout_s:.3g} ms of CPU a rollout, measured at {per_s:,.0f} rollouts/s of {tokens} tokens, and "
        f"{1e6 * agent_s:.3g} µs a second for each worker and LLM server"
    )
    return Coordinator(rollout_s, 0.0, how, agent_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
