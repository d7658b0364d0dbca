"""The benches' task and their clients' rate."""

from __future__ import annotations

import itertools
import time

import pytest

from prorl_hpc.bench import timed_task
from prorl_hpc.bench.coupled import simulation
from prorl_hpc.bench.load_client import Load, due_at_rate
from prorl_hpc.bench.noop_worker import NoRuntime
from prorl_hpc.bench.simulation_draws import Draws
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.sandbox.protocol import Runtime, SandboxSpec
from prorl_hpc.tasks.protocol import RolloutContext
from prorl_hpc.tasks.registry import get_handler


async def test_the_task_notes_a_delay_between_each_two_stages() -> None:
    handler = get_handler(timed_task.TASK_NAME, TaskConfig(name=timed_task.TASK_NAME))
    runtime: Runtime = NoRuntime()
    row = {"id": "x", "run_s": 0.01}
    handler.check_row(row)
    context = RolloutContext(RolloutSpec("r", timed_task.TASK_NAME, row), await runtime.start(SandboxSpec("s")))
    before = len(timed_task.stage_delays_s)
    began = time.monotonic()
    await handler.init(context)
    await handler.run(context)
    assert (await handler.eval(context)).reward == 1.0
    assert time.monotonic() - began >= 0.01
    delays = timed_task.stage_delays_s[before:]
    assert len(delays) == 2 and all(delay >= 0 for delay in delays)
    with pytest.raises(ValueError, match="run_s=-1"):
        handler.check_row({"id": "x", "run_s": -1})


async def test_a_rate_is_kept_to_the_last_one() -> None:
    began = time.monotonic()
    counts = [due async for due in due_at_rate(1000.0, 50, 0.005)]
    assert sum(counts) == 50 and time.monotonic() - began >= 0.05


def test_a_load_repeats_its_rows() -> None:
    load = Load(3, name="l", rows=[{"run_s": 1.0}, {"run_s": 2.0}])
    assert [load.spec(number).row["run_s"] for number in range(3)] == [1.0, 2.0, 1.0]
    assert [load.spec(number).rollout_id for number in range(2)] == ["l-0", "l-1"]
    assert Load(1).row(0) == {"id": "load-0"}


def test_the_mixed_workload_is_what_its_description_says() -> None:
    config = simulation(20_000, coupled=True)
    config.check()
    rollouts = list(itertools.islice(Draws(config).fates(0), config.rollouts))
    run, evaluation = (sum(fate[place] for fate in rollouts) / len(rollouts) for place in (1, 2))
    assert run == pytest.approx(0.2, rel=0.02) and evaluation == pytest.approx(0.85, rel=0.02)
