"""Switches of the scheduler that a run is compared by, in the simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prorl_hpc.bench.simulation import SimulationResult, simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.messages.errors import ConfigError

BATCHES = SimulationConfig(
    plot="", nodes=2, slots=8, rollouts=640, groups_per_batch=4, group_size=4, max_parallel_groups=8, when_full="cancel",
    init="constant:1", run="lognormal:10:0.8", eval="constant:1",
)  # fmt: skip


def simulated(config: SimulationConfig, **changes: Any) -> SimulationResult:
    return simulate(dataclasses.replace(config, **changes))


def test_batches_wait_for_cancelled_runs_that_go_on() -> None:
    ours, stale = simulated(BATCHES), simulated(BATCHES, abort_cancelled=False)
    assert ours.statuses["cancelled"] > 0 and stale.statuses["cancelled"] > 0
    assert sum(stale.batch_s) > sum(ours.batch_s)
    assert stale.pool("run").mean_in_use > ours.pool("run").mean_in_use


def test_without_cancellations_clean_up_changes_nothing() -> None:
    stream = SimulationConfig(plot="", nodes=2, slots=8, rollouts=400)
    assert simulated(stream).virtual_s == simulated(stream, abort_cancelled=False).virtual_s


def test_without_a_buffer_every_rollout_waits_for_its_sandbox_in_a_run_slot() -> None:
    """A slot then gives one rollout in INIT + RUN seconds, in place of one in RUN seconds."""
    stream = SimulationConfig(
        plot="", nodes=1, slots=8, init_slots=8, rollouts=4000, init="constant:4", run="constant:6", eval="constant:0.1"
    )
    buffered, bare = simulated(stream, ready_slots=16), simulated(stream, ready_ratio=0.0)
    assert buffered.steady_per_s == pytest.approx(8 / 6, rel=0.01)
    assert bare.steady_per_s == pytest.approx(8 / (4 + 6), rel=0.01)
    assert bare.pool("ready").mean_in_use == 0


def test_servers_without_a_prefix_cache_are_not_chosen_for_each_request() -> None:
    with pytest.raises(ConfigError, match="balancing=round_robin_per_request"):
        simulated(BATCHES, balancing="round_robin_per_request")
