"""Worker processes that are stopped, killed, started again, or share a node: nothing of one is left or touched."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_bench import PATIENCE_S
from worker_site import Site

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.control import Discard, Discarded, ServerRef, StageFinished, StartEval, StartRun, WorkerHello
from prorl_hpc.messages.rollout import Stage
from prorl_hpc.sandbox.directories import Holding

SERVER = ServerRef("server-0", "another-node", "", "tcp://127.0.0.1:9")
QUICK = {"command": "true"}
DEAF = {"command": "trap '' TERM INT HUP; (trap '' TERM HUP; sleep 1000) & touch started; while :; do sleep 0.1; done"}


@pytest.fixture
def config(process_config: ProrlConfig) -> ProrlConfig:
    process_config.task.name = "command_task:CommandTask"
    return process_config


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def started(site: Site) -> list[Path]:
    return list(site.runtime_dir.glob("sb-*/*/work/started"))


async def test_a_discard_ends_commands_that_ignore_signals(site: Site) -> None:
    await site.joined()
    await site.start_init("r1", DEAF)
    await until(lambda: started(site))
    began = time.monotonic()
    await site.coordinator.order(Discard("r1"))
    await site.coordinator.expect(Discarded)
    print(f"answered after {time.monotonic() - began:.3f} s")
    assert (site.boxes(), site.sandbox_processes()) == ([], [])


async def test_a_worker_that_was_given_up_and_comes_back(site: Site) -> None:
    """Stopped as a whole, as by a node that hangs: it says what it holds, and what is stale is discarded."""
    worker = await site.joined()
    await site.init("stale", QUICK)
    await site.start_init("running", DEAF)
    await until(lambda: started(site))
    worker.send_signal(signal.SIGSTOP)
    site.coordinator.knows = False
    worker.send_signal(signal.SIGCONT)
    held = {each.rollout_id: each for each in (await site.coordinator.expect(WorkerHello)).held}
    assert [report.stage for report in held["stale"].reports] == [Stage.INIT]
    assert held["running"].running is Stage.INIT
    await site.coordinator.order(Discard("stale"), Discard("running"))
    answers = {(await site.coordinator.expect(Discarded)).rollout_id for _ in range(2)}
    assert answers == {"stale", "running"}
    assert (site.boxes(), site.sandbox_processes()) == ([], [])
    assert (await site.init("next", QUICK)).failure is None


async def test_a_coordinator_that_was_killed_and_comes_back_elsewhere(site: Site) -> None:
    await site.joined()
    await site.init("r1", QUICK)
    await site.coordinator.close()
    site.open_coordinator("another.sock")
    [held] = (await site.coordinator.expect(WorkerHello)).held
    assert [report.stage for report in held.reports] == [Stage.INIT]
    await site.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
    assert (await site.coordinator.expect(StageFinished)).stage is Stage.RUN
    await site.coordinator.order(StartEval("r1", PATIENCE_S))
    assert (await site.coordinator.expect(StageFinished)).reward == 1.0


async def test_a_worker_started_again_removes_what_the_killed_one_left(site: Site) -> None:
    worker = await site.joined()
    await site.init("r0", QUICK)
    await site.start_init("r1", DEAF)
    await until(lambda: started(site))
    left = set(site.boxes())
    assert len(left) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    for _ in range(2):  # the second time in a row as well
        worker = site.start()
        hello = await site.coordinator.expect(WorkerHello)
        assert (hello.worker_id, hello.held) == ("worker-0", [])
        assert not left & set(site.boxes())
        assert site.sandbox_processes() == []
        assert (await site.init("r1", QUICK)).failure is None
        left = set(site.boxes())
        worker.send_signal(signal.SIGKILL)
        worker.wait()


async def test_two_workers_of_a_node_leave_each_other_alone(site: Site) -> None:
    first, second = await site.joined("worker-0"), await site.joined("worker-1")
    await site.init("r0", QUICK, to="worker-0")
    await site.init("r1", QUICK, to="worker-1")
    assert len(site.boxes()) == 2
    first.send_signal(signal.SIGKILL)  # and the one that follows it sweeps
    first.wait()
    third = await site.joined("worker-0")
    assert len(site.boxes()) == 1
    third.send_signal(signal.SIGTERM)  # closes its runtime
    assert await site.exit_code(third) == 0
    for order in (StartRun("r1", SERVER, PATIENCE_S), StartEval("r1", PATIENCE_S)):
        await site.coordinator.order(order, to="worker-1")
        assert (await site.coordinator.expect(StageFinished)).failure is None
    second.send_signal(signal.SIGTERM)
    assert await site.exit_code(second) == 0
    assert (site.boxes(), site.sandbox_processes()) == ([], [])


def test_a_holding_of_the_same_process_id_is_no_obstacle(tmp_path: Path) -> None:
    """Where process ids start anew, as in containers that share the node's /tmp, the name may be taken."""
    first = Holding(tmp_path)
    number = int(first.path.name.rpartition("-")[2])
    (tmp_path / f"sb-{os.getpid()}-{number + 1}").mkdir()
    second = Holding(tmp_path)
    assert second.path.name == f"sb-{os.getpid()}-{number + 2}"
    first.release()
    second.release()
