"""No rollout is lost and none delivered twice, while workers and the coordinator are killed with SIGKILL.

Real processes over real ZeroMQ and HTTP. A client submits and reads the stream of results with a cursor; workers die
every few seconds and are started again at once, the coordinator dies a few times and is started again in the same
job. At the end each id is counted on the stream, in the Parquet files and in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prorl_hpc.bench.client_of_run import service_client
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.load_client import Load
from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.bench.throughput import noop_pools
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Status
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.service.client import RolloutClient

_CALL = 250
"""Rollouts per call of the client."""
_STILL_S = 180.0
"""No result for so long: something is stuck."""
_LATE_S = 3.0
"""How long the stream is read on after the last result, for one that comes twice."""


@dataclass(frozen=True)
class SoakPlan:
    """``worker_kill_s``: least and most seconds between two kills of workers. The coordinator is killed
    ``coordinator_kills`` times, evenly over the results. ``reconnect_every``: results after which the client drops its
    stream by itself and goes on from its cursor. ``run_s``: how long RUN sleeps."""

    rollouts: int = 50_000
    workers: int = 8
    worker_kill_s: tuple[float, float] = (2.0, 5.0)
    coordinator_kills: int = 2
    in_flight: int = 2_000
    run_s: float = 0.0
    reconnect_every: int = 5_000
    seed: int = 0

    @property
    def config(self) -> RolloutConfig:
        """Attempts enough that none ends because its workers were killed one after the other."""
        pools = noop_pools()
        pools.init_slots, pools.ready_slots, pools.run_slots, pools.eval_slots = 16, 32, 32, 16
        pools.retries, pools.heartbeat_s, pools.lost_after_s = 50, 1.0, 20.0
        return pools


@dataclass
class SoakCount:
    """What was seen. ``kills``: (seconds since the start, who)."""

    on_stream: Counter[str] = field(default_factory=Counter)
    in_files: Counter[str] = field(default_factory=Counter)
    in_journal: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    kills: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def lost(self, ids: Iterable[str], seen: Counter[str]) -> int:
        return sum(seen[rollout_id] == 0 for rollout_id in ids)

    @staticmethod
    def twice(seen: Counter[str]) -> int:
        return sum(count > 1 for count in seen.values())

    def killed(self, what: str) -> int:
        return sum(name.startswith(what) for _, name in self.kills)


class Soak:
    """One run of ``plan`` on ``bed``, which is started."""

    def __init__(self, plan: SoakPlan, bed: Testbed, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._bed = bed
        self._say = say
        self._random = random.Random(plan.seed)
        self._load = Load(plan.rollouts, name="soak", rows=[{"run_s": plan.run_s}])
        self._began = time.monotonic()
        self._heard = self._began
        self._processes = asyncio.Lock()
        self._next_kill = plan.rollouts
        self._kill_is_due = asyncio.Event()
        self.count = SoakCount()

    async def run(self) -> SoakCount:
        """RunError if a process dies that was not killed, or results stop coming."""
        self._began = self._heard = time.monotonic()
        async with service_client(self._bed) as client:
            side = [self._kill_workers(), self._kill_coordinator(), self._watch()]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in side]
                reader = group.create_task(self._read(client))
                await self._submit(client)
                await reader
                for task in tasks:
                    task.cancel()
        self.count.seconds = time.monotonic() - self._began
        return self.count

    async def _submit(self, client: RolloutClient) -> None:
        sent = 0
        while sent < self._plan.rollouts:
            if sent - len(self.count.on_stream) > self._plan.in_flight - _CALL:
                await asyncio.sleep(0.02)
                continue
            upto = min(sent + _CALL, self._plan.rollouts)
            await client.submit_rollouts([self._load.spec(number) for number in range(sent, upto)])
            sent = upto

    async def _read(self, client: RolloutClient) -> None:
        """All results, then what comes late."""
        cursor = 0
        while len(self.count.on_stream) < self._plan.rollouts:
            cursor = await self._read_some(client, cursor, self._plan.reconnect_every)
        try:
            async with asyncio.timeout(_LATE_S):
                await self._read_some(client, cursor, 1)
        except TimeoutError:
            pass  # nothing came, as it should be

    async def _read_some(self, client: RolloutClient, cursor: int, limit: int) -> int:
        """At most ``limit`` results of a new stream behind ``cursor``; the cursor of the last."""
        read = 0
        stream = client.stream(cursor)
        try:
            async for numbered in stream:
                cursor, result = numbered.cursor, numbered.result
                self.count.on_stream[result.rollout_id] += 1
                self.count.statuses[result.status.value] += 1
                self.count.attempts += result.attempts
                self._heard = time.monotonic()
                if len(self.count.on_stream) >= self._next_kill:
                    self._kill_is_due.set()
                read += 1
                if read == limit or len(self.count.on_stream) == self._plan.rollouts:
                    break
        finally:
            await stream.aclose()
        return cursor

    async def _kill_workers(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(*self._plan.worker_kill_s))
            if len(self.count.on_stream) == self._plan.rollouts:
                return
            name = self._random.choice(self._bed.workers)
            async with self._processes:
                self._kill(name)
                self._bed.start_worker(name)

    async def _kill_coordinator(self) -> None:
        kills = self._plan.coordinator_kills
        for number in range(1, kills + 1):
            self._next_kill = number * self._plan.rollouts // (kills + 1)
            self._kill_is_due.clear()
            await self._kill_is_due.wait()
            async with self._processes:
                self._kill("coordinator")
                await asyncio.to_thread(self._bed.start_coordinator)

    def _kill(self, name: str) -> None:
        self._bed.processes.kill(name)
        after_s = time.monotonic() - self._began
        self.count.kills.append((after_s, name))
        self._say(f"{after_s:6.1f} s: kill -9 {name} ({len(self.count.on_stream)} of {self._plan.rollouts} results)")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            async with self._processes:
                self._bed.processes.check()
            if time.monotonic() - self._heard > _STILL_S:
                raise RunError(
                    f"no result for {_STILL_S:.0f} s, {len(self.count.on_stream)} of {self._plan.rollouts} are here"
                )


def soak(plan: SoakPlan, say: Callable[[str], None]) -> SoakCount:
    """Everything: start, run, stop, count. RunError with the last lines of the logs if it breaks."""
    with Testbed.open(plan.config, plan.workers) as bed:
        bed.start()
        say(f"{plan.rollouts} rollouts through {plan.workers} workers, seed {plan.seed}")
        try:
            count = asyncio.run(Soak(plan, bed, say).run())
        except* RunError as group:
            raise group.exceptions[0] from None
        bed.stop()
        files = read_rollouts(bed.run, ["rollout_id"])
        count.in_files.update(files.column("rollout_id").to_pylist())
        count.in_journal.update(recorded_ids(bed.run))
        return count


def recorded_ids(run: RunDirectory) -> list[str]:
    """Of the journal's results; nobody may have it open."""
    with contextlib.closing(sqlite3.connect(f"file:{run.journal_file}?mode=ro", uri=True)) as connection:
        return [rollout_id for (rollout_id,) in connection.execute("SELECT rollout FROM results")]


def figures(plan: SoakPlan, count: SoakCount) -> list[Figure]:
    ids = [f"soak-{number}" for number in range(plan.rollouts)]
    how = (
        f"{plan.rollouts} rollouts, {plan.workers} workers; kill -9: {count.killed('worker')} of workers, "
        f"{count.killed('coordinator')} of the coordinator; {count.attempts} attempts in {count.seconds:.0f} s, "
        f"seed {plan.seed}; {dict(count.statuses)}"
    )
    places = [("stream", count.on_stream), ("Parquet files", count.in_files), ("journal", count.in_journal)]
    found = []
    for place, seen in places:
        found.append(Figure.exactly(f"lost ({place})", count.lost(ids, seen), 0, "rollouts", "accepted ids", how))
        how = ""
        found.append(Figure.exactly(f"delivered twice ({place})", count.twice(seen), 0, "rollouts", "accepted ids"))
        found.append(Figure.exactly(f"unknown ids ({place})", len(seen.keys() - set(ids)), 0, "ids", "accepted ids"))
    failed = plan.rollouts - count.statuses[Status.DONE]
    found.append(Figure.exactly("not done", failed, 0, "rollouts", "accepted ids"))
    return found
