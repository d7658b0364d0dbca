"""``python -m prorl_hpc.bench.load_client --run-dir DIR --name NAME --load FILE``: one client of the service.

Writes ``<run>/state/<name>.load.json`` (LoadRecord) when it has every result.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec

from prorl_hpc.bench.timed_task import TASK_NAME
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status
from prorl_hpc.observe.process import Process, favour_the_loop, run_to_end
from prorl_hpc.service.client import RolloutClient

GROUP_SIZE = 8
_TICK_S = 0.005
_BATCH_GROUPS = 256
_BATCHES_AT_ONCE = 2


class Form(enum.StrEnum):
    """How the rollouts are asked for."""

    BATCHES = "batches"
    """As batches of groups, two at a time; the result of each is fetched when it is done."""
    STREAM = "stream"
    """One by one, many to a call, with the results read from the NDJSON stream."""
    STEADY = "steady"
    """As STREAM, but at ``Load.per_s`` whether or not results come."""


class Load(msgspec.Struct, frozen=True):
    """What to ask for. ``rows`` are repeated until there are ``rollouts``; none: no-ops. ``in_flight``: at most so
    many at once (not with STEADY)."""

    rollouts: int
    form: Form = Form.BATCHES
    in_flight: int = 2000
    per_s: float = 0.0
    name: str = "load"
    rows: list[dict[str, float]] = []

    def row(self, number: int) -> dict[str, object]:
        given = self.rows[number % len(self.rows)] if self.rows else {}
        return {"id": f"{self.name}-{number}", **given}

    def spec(self, number: int) -> RolloutSpec:
        return RolloutSpec(f"{self.name}-{number}", TASK_NAME, self.row(number))


class LoadRecord(msgspec.Struct, frozen=True):
    """``began``: before the first order; ``ended``: when the last result was here. time.monotonic(), which all
    processes of a Linux machine share."""

    began: float
    ended: float
    statuses: dict[str, int]

    @property
    def done(self) -> int:
        return self.statuses.get(Status.DONE, 0)

    @classmethod
    def of(cls, began: float, results: Iterable[RolloutResult]) -> LoadRecord:
        return cls(began, time.monotonic(), dict(Counter(result.status.value for result in results)))

    @classmethod
    def read(cls, run: RunDirectory, name: str) -> LoadRecord:
        """RunError if the client did not end in order."""
        record = read_json(_record_file(run, name), cls)
        if record is None:
            raise RunError(f"the client {name} wrote no record")
        return record


def _record_file(run: RunDirectory, name: str) -> Path:
    return run.state / f"{name}.load.json"


async def as_batches(client: RolloutClient, load: Load) -> LoadRecord:
    """As a trainer that orders the next step while one is under way: two batches at once."""
    groups = -(-load.rollouts // GROUP_SIZE)
    starts = range(0, groups, _BATCH_GROUPS)
    parallel = max(1, load.in_flight // GROUP_SIZE // _BATCHES_AT_ONCE)
    room = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def one(start: int) -> list[RolloutResult]:
        count = min(_BATCH_GROUPS, groups - start)
        rows = [load.row(number) for number in range(start, start + count)]
        name = f"{load.name}-{start}"
        spec = BatchSpec(name, TASK_NAME, rows, count, GROUP_SIZE, GroupFilter.ALL, max_parallel_groups=parallel)
        async with room:
            await client.submit_batch(spec)
            result = await client.wait_batch(name)
        return [rollout for group in result.groups for rollout in group.rollouts]

    began = time.monotonic()
    found = await asyncio.gather(*map(one, starts))
    return LoadRecord.of(began, itertools.chain.from_iterable(found))


async def as_stream(client: RolloutClient, load: Load) -> LoadRecord:
    """Closed loop: when a quarter of the window is free, it is filled in one call."""
    began = time.monotonic()
    results: list[RolloutResult] = []
    stream = client.stream()
    sent = 0
    while len(results) < load.rollouts:
        room = min(load.in_flight - (sent - len(results)), load.rollouts - sent)
        if room >= min(load.in_flight // 4, load.rollouts - sent) and room > 0:
            await client.submit_rollouts([load.spec(number) for number in range(sent, sent + room)])
            sent += room
        results.append((await anext(stream)).result)
    return LoadRecord.of(began, results)


async def steadily(client: RolloutClient, load: Load) -> LoadRecord:
    """Open loop: what is late goes with the next call."""
    began = time.monotonic()
    results: list[RolloutResult] = []

    async def read() -> None:
        async for numbered in client.stream():
            results.append(numbered.result)
            if len(results) == load.rollouts:
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        sent = 0
        async for due in due_at_rate(load.per_s, load.rollouts, _TICK_S):
            # Not awaited: what arrives does not wait for the answer to what came before.
            specs = [load.spec(number) for number in range(sent, sent + due)]
            group.create_task(client.submit_rollouts(specs))
            sent += due
    return LoadRecord.of(began, results)


async def due_at_rate(per_s: float, total: int, tick_s: float) -> AsyncIterator[int]:
    """How many are due now, again and again until ``total``: late ticks are made up for."""
    began, made = time.monotonic(), 0
    while made < total:
        due = min(int((time.monotonic() - began) * per_s), total) - made
        if due > 0:
            yield due
            made += due
        await asyncio.sleep(tick_s)


_FORMS = {Form.BATCHES: as_batches, Form.STREAM: as_stream, Form.STEADY: steadily}


async def serve(process: Process, load: Load) -> None:
    await process.wait_for("coordinator", 60)
    favour_the_loop()
    async with RolloutClient.for_run(process) as client:
        record = await _FORMS[load.form](client, load)
    write_json(_record_file(process.run, process.name), record)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--load", type=Path, required=True)
    arguments = parser.parse_args()
    process = Process.start("client", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process, msgspec.json.decode(arguments.load.read_bytes(), type=Load)))


if __name__ == "__main__":
    sys.exit(main())
