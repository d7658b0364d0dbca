"""How long a rollout waits from the end of a stage to the start of its next one, at half the service's throughput.

Measured in the worker, on one clock: from the last line of the task's stage to the first line of its next. That holds
the report's way to the coordinator, the scheduler, the order's way back and the worker's own part. Beside it stands
the floor: the bare round trip of the same messages through the same ZeroMQ door, as many of them per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prorl_hpc.bench.echo import EchoRecord
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.load_client import Form, Load, LoadRecord
from prorl_hpc.bench.noop_worker import WorkerRecord
from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.bench.throughput import noop_pools
from prorl_hpc.messages.errors import RunError

GOAL_MS = 10.0
_LOAD = 0.5
_REPORTS = 3
"""Messages per rollout and direction."""


def measure(quick: bool, throughput_per_s: float, say: Callable[[str], None]) -> list[Figure]:
    """``throughput_per_s``: rollouts, as measured on this machine just now."""
    seconds = 8.0 if quick else 30.0
    rate = _LOAD * throughput_per_s
    floor_ms = _milliseconds(_round_trips(_REPORTS * rate, seconds))
    say(f"bare round trip at {_REPORTS * rate:.0f}/s: p50 {floor_ms(0.5):.2f} ms, p99 {floor_ms(0.99):.2f} ms")
    delay_ms = _milliseconds(_stage_delays(rate, seconds))
    say(f"stage end to next stage at {rate:.0f} rollouts/s: p50 {delay_ms(0.5):.2f} ms, p99 {delay_ms(0.99):.2f} ms")
    detail = f"{rate:.0f} rollouts/s, steady, for {seconds:.0f} s; p50 {delay_ms(0.5):.2f} ms"
    floor = f"bare round trip at the same rate: p50 {floor_ms(0.5):.2f} ms, p99 {floor_ms(0.99):.2f} ms"
    name = "p99 of scheduling delay"
    return [
        Figure.below(name, delay_ms(0.99), GOAL_MS, "ms", "load at 50 %", detail),
        Figure.told(name, delay_ms(0.99) / floor_ms(0.99), "x", "p99 of the bare round trip", floor),
    ]


def _stage_delays(per_s: float, seconds: float) -> list[float]:
    rollouts = int(per_s * seconds)
    with Testbed.open(noop_pools(), workers=1) as bed:
        bed.start()
        bed.start_client("client-0", Load(rollouts, Form.STEADY, per_s=per_s))
        bed.wait_client("client-0", timeout_s=60 + 4 * seconds)
        done = LoadRecord.read(bed.run, "client-0").done
        bed.stop()
        delays_s = WorkerRecord.read(bed.run, "worker-0").stage_delays_s
    if done != rollouts or len(delays_s) != 2 * rollouts:
        raise RunError(f"{rollouts} rollouts were ordered, {done} are done, with {len(delays_s)} delays noted")
    return delays_s


def _round_trips(per_s: float, seconds: float) -> list[float]:
    with Testbed.open(noop_pools(), workers=0) as bed:
        bed.start_module("bench.echo", "door")
        bed.start_module("bench.echo", "line", "--per-s", str(per_s), "--seconds", str(seconds))
        if bed.processes.wait("line", 60 + 2 * seconds) != 0:
            raise RunError("the bare round trips could not be measured")
        return EchoRecord.read(bed.run).round_trips_s


def _milliseconds(values_s: Sequence[float]) -> Callable[[float], float]:
    """The quantile function of ``values_s``."""
    ordered = sorted(values_s)
    return lambda share: 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]
