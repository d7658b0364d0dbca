"""How soon a sandbox is there: one alone, out of the warm pool, and many at once."""

from __future__ import annotations

import asyncio
import itertools
import time

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Samples, in_turns, p95_if_enough, ratio, told_ratio
from prorl_hpc.bench.sandbox_bed import open_runtime
from prorl_hpc.bench.start_by_hand import ByHand
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import RunError, SandboxError
from prorl_hpc.sandbox.protocol import Runtime, Sandbox, SandboxSpec

_READY_GOAL, _MANY_GOAL = 1.3, 0.8
_WARM_GOAL_MS = 5.0
_REFILL_S = 0.6
"""Several times what a start takes."""
_CALL_S = 20.0
_numbers = itertools.count()


async def ready(starts: int, say: Say) -> list[Figure]:
    """From the start of a sandbox until its tool server and shell have answered, against the floor."""
    with scratch_directory() as directory:
        by_hand = ByHand(directory)
        async with open_runtime("apptainer", SandboxConfig(start_retries=0)) as runtime:

            async def ours(count: int) -> list[float]:
                return [await _start_and_stop(runtime) for _ in range(count)]

            async def server(count: int) -> list[float]:
                return [await by_hand.server() for _ in range(count)]

            async def least(count: int) -> list[float]:
                return [await by_hand.least() for _ in range(count)]

            mine, floor, no_server = await in_turns(starts, 1, ours, server, least)
    say(f"ready: ours {mine}, echo server by hand {floor}, without server {no_server}")
    name = "sandbox ready"
    return [
        *ratio(name, mine, floor, _READY_GOAL, "one `apptainer exec` of an echo server, by hand"),
        *told_ratio(name, mine, no_server, "one `apptainer exec` of `python3 -I -S`, no server"),
    ]


async def _start_and_stop(runtime: Runtime) -> float:
    began = time.perf_counter()
    sandbox = await runtime.start(_next_spec())
    seconds = time.perf_counter() - began
    await sandbox.stop()
    return seconds


async def warm(waits: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    """What INIT, and so RUN, waits for a sandbox when the pool has one."""
    seconds = []
    async with open_runtime(kind, SandboxConfig(warm=2, start_retries=0)) as runtime:
        for _ in range(waits):
            await asyncio.sleep(_REFILL_S)
            began = time.perf_counter()
            sandbox = await runtime.start(_next_spec())
            seconds.append(time.perf_counter() - began)
            answer = await sandbox.call("bash", {"command": "echo hello"}, _CALL_S)
            if answer.output != "hello\n":
                raise RunError(f"a warm sandbox answered `echo hello` with {answer}")
            await sandbox.stop()
    waited = Samples(seconds)
    say(f"warm: {waited}")
    how = f"{waits} waits, the pool of 2 refilled before each; {waited}"
    return [
        Figure.below("wait for a warm sandbox, median", 1000 * waited.median, _WARM_GOAL_MS, "ms", "the goal", how),
        p95_if_enough(
            Figure.below("wait for a warm sandbox, p95", 1000 * waited.p95, _WARM_GOAL_MS, "ms", "the goal"), waited
        ),
    ]


async def many(count: int, rounds: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    """``count`` sandboxes that are alive together: asked for at once, against one after the other."""
    failures: list[str] = []
    async with open_runtime(kind, SandboxConfig(start_retries=0)) as runtime:

        async def at_once(_: int) -> list[float]:
            return [await _start_all(runtime, count, failures, at_once=True)]

        async def one_by_one(_: int) -> list[float]:
            return [await _start_all(runtime, count, failures, at_once=False)]

        together, alone = await in_turns(rounds, 1, at_once, one_by_one)
    say(
        f"{count} sandboxes: at once {together.median:.2f} s, one by one {alone.median:.2f} s, {len(failures)} failures"
    )
    how = f"{together.median:.2f} s against {alone.median:.2f} s; medians of {rounds} turns"
    return [
        Figure.exactly(
            "failures", len(failures), 0, "sandboxes", f"{2 * rounds * count} starts", "; ".join(failures[:2])
        ),
        Figure.at_most(
            f"{count} sandboxes at once", together.median / alone.median, _MANY_GOAL, "x", "one by one", how
        ),
    ]


async def _start_all(runtime: Runtime, count: int, failures: list[str], *, at_once: bool) -> float:
    """Seconds until all are there."""
    started: list[Sandbox] = []

    async def start() -> None:
        try:
            started.append(await runtime.start(_next_spec()))
        except SandboxError as error:
            failures.append(str(error))

    began = time.perf_counter()
    if at_once:
        await asyncio.gather(*(start() for _ in range(count)))
    else:
        for _ in range(count):
            await start()
    seconds = time.perf_counter() - began
    await asyncio.gather(*(sandbox.stop() for sandbox in started))
    return seconds


def _next_spec() -> SandboxSpec:
    return SandboxSpec(f"bench-{next(_numbers)}")
