"""Cancelled work from the coordinator's order to the slot in the engine, with the real processes of a run.

The engine's replies would take hours, so that a slot which becomes free was freed by the cancellation, whatever the clock
says. What it takes is a figure of the benchmarks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from real_run import RealRun

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchState
from prorl_hpc.messages.status import RunStatus
from prorl_hpc.service.client import RolloutClient

pytestmark = pytest.mark.timeout(120)
ROLLOUTS = 8


def endless(config: ProrlConfig) -> None:
    config.engine.script = {"token_s": 3600.0}


def endless_without_clean_up(config: ProrlConfig) -> None:
    config.engine.script = {"token_s": 0.3, "reply_min_tokens": 10_000}
    config.task.max_turn_tokens = config.model.max_context_tokens - 1
    config.rollout.abort_cancelled = False


async def until(client: RolloutClient, condition: Callable[[RunStatus], bool]) -> RunStatus:
    async with asyncio.timeout(60):
        while not condition(status := await client.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return status


def in_engine(status: RunStatus) -> int:
    return sum(server.running for server in status.servers)


def in_run(status: RunStatus) -> int:
    return sum(worker.pools["run"][0] for worker in status.workers)


def generated(status: RunStatus) -> int:
    return sum(server.generated_tokens for server in status.servers)


@asynccontextmanager
async def busy(directory: Path, change: Callable[[ProrlConfig], None]) -> AsyncIterator[RolloutClient]:
    """A run with a batch whose rollouts are all in RUN, and have a slot in the engine."""
    real = RealRun(directory, change)
    try:
        await real.ready()
        async with real.client(patience_s=10) as client:
            await client.submit_batch(real.order("b", groups=ROLLOUTS // 4))
            await until(client, lambda status: in_engine(status) == in_run(status) == ROLLOUTS)
            yield client
    finally:
        real.end()


async def test_what_is_cancelled_frees_its_slots_on_worker_and_engine(tmp_path: Path) -> None:
    async with busy(tmp_path, endless) as client:
        assert (await client.cancel_batch("b")).state is BatchState.CANCELLED
        await until(client, lambda status: in_engine(status) == in_run(status) == 0)


async def test_without_clean_up_it_goes_on(tmp_path: Path) -> None:
    async with busy(tmp_path, endless_without_clean_up) as client:
        assert (await client.cancel_batch("b")).state is BatchState.CANCELLED
        then = generated(await client.status())
        status = await until(client, lambda status: generated(status) > then + 2 * ROLLOUTS)
        assert in_engine(status) == in_run(status) == ROLLOUTS
        assert status.rollouts["cancelled"] == ROLLOUTS
