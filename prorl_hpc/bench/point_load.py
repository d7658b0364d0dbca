"""``python -m prorl_hpc.bench.point_load --run-dir DIR --name NAME``: the load of a point, in place of the run's trainer.

Reads ``<run>/bench_order.json`` (LoadOrder), orders that of the service as a trainer does, asks it once a second how it
stands, leaves ``<run>/bench_record.json`` (LoadRecord), and ends the run. Rows are those of the run's task, in an order by
``LoadOrder.seed``, again and again: a point of N nodes with N times as many rollouts gets the same work N times.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from prorl_hpc.bench.scaling_records import (
    ORDER_FILE,
    RECORD_FILE,
    BatchNote,
    GaugeSample,
    LoadOrder,
    LoadRecord,
)
from prorl_hpc.messages.batch import BatchResult, BatchSpec, BatchState
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.messages.status import ProcessState, RunStatus, TrainerStatus
from prorl_hpc.observe.process import (
    Process,
    favour_the_loop,
    process_arguments,
    run_to_end,
    stop_event,
    unless_stopped,
)
from prorl_hpc.observe.wording import commonest_failure
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.tasks.dataset import Row, read_rows

_CLIENT = "trainer"
_SAMPLE_S, _BATCH_SAMPLE_S = 1.0, 0.2
"""With batches more often: how soon servers are free of a full batch is a matter of tenths of a second."""
_ROLLOUTS_A_CALL = 500
_SUPPLY = 20
"""Rows of a batch for each group that it wants."""


@dataclass
class Load:
    """One point's load while it goes on."""

    process: Process
    client: RolloutClient
    order: LoadOrder
    rows: list[Row]
    ended_at: dict[str, float] = field(default_factory=dict)
    batches: list[BatchNote] = field(default_factory=list)
    samples: list[GaugeSample] = field(default_factory=list)
    pool_sizes: dict[str, int] = field(default_factory=dict)
    trained_s: float = 0.0
    cursor: int = 0

    def row(self, number: int) -> Row:
        return self.rows[number % len(self.rows)]

    async def run(self) -> LoadRecord:
        """All of it. RunError if the service cannot give what was ordered."""
        coordinator = _coordinator(self.process)
        await self._sample()
        cpu_s, began = _cpu_s(coordinator), time.time()
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._read_results()), group.create_task(self._keep_sampling())]
                await (self._batches() if self.order.batches else self._stream())
                for task in beside:
                    task.cancel()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the first one is the reason, and reads as such in the log
        ended, cpu_after_s = time.time(), _cpu_s(coordinator)
        await self._read_results(follow=False)
        used_s = None if cpu_s is None or cpu_after_s is None else cpu_after_s - cpu_s
        return LoadRecord(
            began, ended, self.ended_at, self.batches, self.trained_s, self.samples, self.pool_sizes, used_s
        )

    # what is ordered

    async def _stream(self) -> None:
        """All at the start; over when every one has ended."""
        task, wanted = self.process.config.task.name, self.order.rollouts
        specs = [
            RolloutSpec(f"load-{n}", task, self.row(n), sampling=self._sampling(), client=_CLIENT)
            for n in range(wanted)
        ]
        for start in range(0, wanted, _ROLLOUTS_A_CALL):
            await self.client.submit_rollouts(specs[start : start + _ROLLOUTS_A_CALL])
        while len(self.ended_at) < wanted:
            self._say("rollouts", len(self.ended_at), wanted)
            await asyncio.sleep(_SAMPLE_S / 4)
        self._say("done", wanted, wanted)

    async def _batches(self) -> None:
        first_row = 0
        for number in range(self.order.batches):
            self._say("rollouts", number, self.order.batches)
            began = time.monotonic()
            result = await self._batch(number, first_row)
            first_row += result.progress.rows_used
            self.batches.append(_note(time.monotonic() - began, result))
            self._say("training", number, self.order.batches)
            await asyncio.sleep(self.order.train_s)
            self.trained_s += self.order.train_s
        self._say("done", self.order.batches, self.order.batches)

    async def _batch(self, number: int, first_row: int) -> BatchResult:
        order = self.order
        rows = [self.row(first_row + n) for n in range(order.groups * _SUPPLY)]
        spec = BatchSpec(
            f"load-{number}",
            self.process.config.task.name,
            rows,
            order.groups,
            order.group_size,
            sampling=self._sampling(),
            client=_CLIENT,
            when_full=order.when_full,
            refill=order.refill,
            max_parallel_groups=order.max_parallel_groups,
        )
        await self.client.submit_batch(spec)
        result = await self.client.wait_batch(spec.batch_id)
        if result.progress.state is not BatchState.DONE:
            raise RunError(_not_full(spec, result))
        return result

    def _sampling(self) -> SamplingParams:
        """The row says how long a turn is, within what the task allows."""
        return SamplingParams(max_tokens=self.process.config.task.max_turn_tokens)

    # what is seen of it

    async def _read_results(self, *, follow: bool = True) -> None:
        async for numbered in self.client.stream(self.cursor, follow=follow, trajectories=False):
            self.cursor = numbered.cursor
            self.ended_at[numbered.result.rollout_id] = time.time()

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(_BATCH_SAMPLE_S if self.order.batches else _SAMPLE_S)
            await self._sample()

    async def _sample(self) -> None:
        status = await self.client.status()
        in_use, sizes = pools_of(status)
        self.pool_sizes = sizes or self.pool_sizes
        servers = [server for server in status.servers if server.healthy]
        running = {server.server_id: server.running for server in servers}
        waiting = {server.server_id: server.waiting for server in servers}
        self.samples.append(GaugeSample(time.time(), in_use, running, waiting))

    def _say(self, phase: str, step: int, steps: int) -> None:
        write_json(self.process.run.trainer_status_file, TrainerStatus(phase, step, steps, time.time()))


def pools_of(status: RunStatus) -> tuple[dict[str, int], dict[str, int]]:
    """Slots in use and slots there are, of all workers together, by pool."""
    in_use: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for worker in status.workers:
        for pool, (used, size) in worker.pools.items():
            in_use[pool] += used
            sizes[pool] += size
    return dict(in_use), dict(sizes)


def ordered_rows(rows: list[Row], seed: int) -> list[Row]:
    """All of them in an order of their own for each seed."""
    return random.Random(seed).sample(rows, len(rows))


def _note(seconds: float, result: BatchResult) -> BatchNote:
    progress = result.progress
    return BatchNote(
        seconds, progress.accepted, progress.uniform, progress.rows_used + progress.carried_in, time.time()
    )


def _not_full(spec: BatchSpec, result: BatchResult) -> str:
    progress = result.progress
    return (
        f"{spec.batch_id} ended {progress.state} with {progress.accepted} of {progress.groups_wanted} groups: of "
        f"{progress.rows_used} groups {progress.uniform} were uniform and {progress.broken} broken "
        f"({progress.rollouts_failed} rollouts failed{commonest_failure(result)}). Lower task.options.kinds.*.uniform_share, or see why rollouts fail"
    )


def _coordinator(process: Process) -> psutil.Process | None:
    """If it is on this node, under the pid that it says."""
    state = read_json(process.run.process_state("coordinator"), ProcessState)
    if state is None or state.node != process.node:
        return None
    try:
        found = psutil.Process(state.pid)
        return found if str(process.run.path) in found.cmdline() else None
    except psutil.Error:
        return None


def _cpu_s(process: psutil.Process | None) -> float | None:
    """CPU time so far; None if it cannot be told (any more)."""
    try:
        return None if process is None else sum(process.cpu_times()[:2])
    except psutil.Error:
        return None


async def all_there(client: RolloutClient, process: Process) -> RunStatus:
    """When every worker and LLM server of the plan is: a point measures so many nodes and no fewer. RunError names what is
    missing when run.start_timeout_s is over."""
    planned = make_plan(process.config).processes
    workers = {plan.name for plan in planned if plan.role == "worker"}
    servers = {plan.name for plan in planned if plan.llm_server}
    deadline = time.monotonic() + process.config.run.start_timeout_s
    while True:
        status = await client.status()
        missing = workers - {worker.worker_id for worker in status.workers}
        missing |= servers - {server.server_id for server in status.servers if server.healthy}
        if not missing:
            return status
        if time.monotonic() > deadline:
            raise RunError(
                f"{', '.join(sorted(missing))} did not come within run.start_timeout_s="
                f"{process.config.run.start_timeout_s:g} s: their logs lie in {process.run.logs}"
            )
        await asyncio.sleep(0.2)


async def load(process: Process) -> None:
    """Until it is done or SIGTERM."""
    stop = stop_event()
    file = process.run.path / ORDER_FILE
    order = read_json(file, LoadOrder)
    if order is None:
        raise RunError(f"{file} is missing: `prorl-hpc bench scaling` writes it before it starts a point")
    rows = ordered_rows(read_rows(process.config.task), order.seed)
    process.ready(detail="load")
    if await unless_stopped(process.wait_for("coordinator", process.config.run.start_timeout_s), stop) is None:
        return
    async with RolloutClient.for_run(process) as client:
        if await unless_stopped(all_there(client, process), stop) is None:
            return
        favour_the_loop()
        record = await unless_stopped(Load(process, client, order, rows).run(), stop)
    if record is not None:
        write_json(process.run.path / RECORD_FILE, record)
        process.run.finished_marker.write_text(f"{len(record.ended_at)} rollouts\n")


def main() -> int:
    arguments = process_arguments("bench.point_load")
    process = Process.start("trainer", arguments.run_dir, arguments.name)
    return run_to_end(process, load(process))


if __name__ == "__main__":
    sys.exit(main())
