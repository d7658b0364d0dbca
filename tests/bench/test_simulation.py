"""Simulations against conservation laws and closed forms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from prorl_hpc.bench.simulation import SimulationResult, simulate
from prorl_hpc.bench.simulation_compare import OWN, compare
from prorl_hpc.bench.simulation_config import SimulationConfig, WorkloadConfig
from prorl_hpc.messages.errors import ConfigError


def simulated(**settings: Any) -> SimulationResult:
    return simulate(SimulationConfig(**{"plot": "", "nodes": 2, "slots": 4, **settings}))


def figures(result: SimulationResult) -> dict[str, Any]:
    """All that must not hang on the machine."""
    left_out = {"wall_s", "peak_rss_mib", "config"}
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in left_out}


FAILING: dict[str, Any] = {
    "init_failures": 0.1,
    "run_failures": 0.1,
    "eval_failures": 0.05,
    "node_mtbf_s": 500.0,
    "node_down_s": 60.0,
    "server_mtbf_s": 300.0,
    "server_down_s": 50.0,
    "servers": 3,
    "server_concurrency": 4.0,
    "turns": 2,
}
CASES: list[dict[str, Any]] = [
    {},
    {"coupled": True},
    {"arrivals": "exponential:5"},
    {"straggler_share": 0.1, "latency_s": 0.01},
    {"groups_per_batch": 10, "uniform_share": 0.3, "train_s": 7.0},
    {"groups_per_batch": 10, "uniform_share": 0.3, "when_full": "carry", "max_parallel_groups": 15},
    {"groups_per_batch": 10, "uniform_share": 0.3, "refill": "in_rounds", "max_parallel_groups": 15, "group_size": 3},
    FAILING,
    {**FAILING, "node_down_s": 5.0, "when_server_lost": "retry"},
    {**FAILING, "coupled": True, "groups_per_batch": 7, "uniform_share": 0.2, "max_parallel_groups": 12},
    {**FAILING, "run_budget_s": 40.0, "total_budget_s": 60.0, "wall_budget_s": 400.0, "latency_s": 0.1},
    {**FAILING, "server_concurrency": 0.0, "init_budget_s": 4.0, "eval_budget_s": 4.0},
]


@pytest.mark.parametrize("settings", CASES)
def test_every_rollout_ends_once_and_no_pool_is_overfull(settings: dict[str, Any]) -> None:
    result = simulated(rollouts=600, **settings)
    assert sum(result.statuses.values()) >= 600
    if not settings.get("groups_per_batch"):
        assert sum(result.statuses.values()) == 600
    assert result.statuses["done"] > 0
    for pool in result.pools:
        assert pool.mean_in_use >= 0
        assert pool.size is None or pool.mean_in_use <= pool.size * (1 + 1e-9)
    assert result.course.finished[-1] == result.statuses["done"]
    assert len(result.batch_s) == (
        math.ceil(600 / (result.config.group_size * n)) if (n := result.config.groups_per_batch) else 0
    )


@pytest.mark.parametrize("settings", CASES[-3:])
def test_the_seed_decides_all(settings: dict[str, Any]) -> None:
    first, again = (simulated(rollouts=300, seed=3, **settings) for _ in range(2))
    assert figures(first) == figures(again)
    assert figures(first) != figures(simulated(rollouts=300, seed=4, **settings))


def test_constant_times_give_slots_per_second() -> None:
    result = simulated(rollouts=8000, init="1", run="10", eval="1", init_slots=8, ready_slots=8, eval_slots=8)
    assert result.ideal_per_s == pytest.approx(8 / 10)
    assert result.limited_by == "run"
    assert result.steady_per_s == pytest.approx(8 / 10, rel=0.01)
    # The first INIT and the last EVAL are all that is not overlapped.
    assert result.virtual_s == pytest.approx(8000 / 8 * 10 + 2)
    assert result.pool("run").utilisation == pytest.approx(1.0, rel=0.01)
    assert result.pool("eval").mean_in_use == pytest.approx(8000 * 1 / result.virtual_s)


def test_decoupled_against_coupled_is_as_the_formula_says() -> None:
    times: dict[str, Any] = {"init": "2", "run": "5", "eval": "13", "init_slots": 4, "ready_slots": 8, "eval_slots": 12}
    config = SimulationConfig(rollouts=4000, nodes=2, slots=4, plot="", **times)
    comparison = compare(config)
    assert list(comparison.results) == [OWN, "one coupled pool"]
    assert set(comparison.left_out) == {"round robin", "synchronous batches"}
    assert comparison.results["one coupled pool"].steady_per_s == pytest.approx(8 / (2 + 5 + 13), rel=0.01)
    assert comparison.results[OWN].steady_per_s == pytest.approx(8 / 5, rel=0.01)
    assert comparison.gain["one coupled pool"] == pytest.approx((2 + 5 + 13) / 5, rel=0.02)


def test_waits_are_those_of_a_queue_with_c_servers() -> None:
    """M/M/c (Erlang C): with c = 4 and a load of 0.8 the mean wait is C(c, a) · s / (c − a)."""
    c, mean_s, load = 4, 10.0, 0.8
    a = c * load
    last = a**c / math.factorial(c) * c / (c - a)
    erlang_c = last / (sum(a**k / math.factorial(k) for k in range(c)) + last)
    result = simulated(
        rollouts=30_000,
        nodes=1,
        slots=c,
        init="0",
        run=f"exponential:{mean_s}",
        eval="0",
        arrivals=f"exponential:{mean_s / a}",
        ready_slots=10_000,
        init_slots=10,
        eval_slots=10,
    )
    waited_s = sum(waits.mean_s for waits in result.waits.values())
    assert waited_s == pytest.approx(erlang_c * mean_s / (c - a), rel=0.06)
    assert result.pool("run").utilisation == pytest.approx(load, rel=0.03)


def test_servers_bound_the_throughput() -> None:
    result = simulated(
        rollouts=4000, slots=50, run="10", init="0.1", eval="0.1", servers=2, server_concurrency=5, generation_share=0.8
    )
    assert result.limited_by == "servers"
    assert result.steady_per_s == pytest.approx(2 * 5 / 8, rel=0.02)
    assert result.pool("servers").utilisation == pytest.approx(1.0, rel=0.02)


def test_servers_with_room_slow_nothing_down() -> None:
    free = simulated(rollouts=500, server_concurrency=0.0)
    served = simulated(rollouts=500, server_concurrency=100.0, turns=3)
    assert served.virtual_s == pytest.approx(free.virtual_s)
    assert served.waits["run"].mean_s == pytest.approx(free.waits["run"].mean_s)


def test_infrastructure_faults_are_retried_and_counted() -> None:
    result = simulated(rollouts=4000, run_failures=0.2, retries=3)
    ended = result.statuses
    assert ended["done"] + ended["failed"] == 4000
    assert ended["failed"] == pytest.approx(4000 * 0.2**4, abs=12)
    assert result.retries == pytest.approx(4000 * (0.2 + 0.2**2 + 0.2**3), rel=0.1)


def test_lost_nodes_cost_attempts_not_rollouts() -> None:
    result = simulated(rollouts=2000, node_mtbf_s=400.0, node_down_s=30.0, lost_after_s=5.0, retries=20)
    assert result.statuses["done"] == 2000
    assert result.retries > 0


def test_budgets_end_what_takes_too_long() -> None:
    long = simulated(rollouts=1000, run="0.5*constant:10+0.5*constant:100", run_budget_s=50.0)
    assert long.statuses["timed_out"] == pytest.approx(500, abs=60)
    assert long.statuses["done"] + long.statuses["timed_out"] == 1000
    served = simulated(
        rollouts=1000, run="0.5*constant:10+0.5*constant:100", run_budget_s=50.0, server_concurrency=1000.0
    )
    assert served.statuses == long.statuses


def test_batches_drop_uniform_groups_and_refill_at_once_is_faster() -> None:
    config = SimulationConfig(
        rollouts=1280, nodes=4, slots=64, plot="", groups_per_batch=16, uniform_share=0.5, server_concurrency=20.0
    )
    comparison = compare(config)
    assert not comparison.left_out
    own, rounds = comparison.results[OWN], comparison.results["synchronous batches"]
    assert len(own.batch_s) == len(rounds.batch_s) == 10
    assert own.statuses["done"] == pytest.approx(2 * 1280, rel=0.15)
    assert comparison.gain["synchronous batches"] > 1.2


def test_least_in_flight_spreads_what_round_robin_does_not() -> None:
    config = SimulationConfig(
        rollouts=4000,
        nodes=4,
        slots=32,
        servers=8,
        server_concurrency=10.0,
        init="0.1",
        run="0.8*constant:2+0.2*constant:60",
        eval="0.1",
    )
    results = compare(config).results
    assert results[OWN].steady_per_s > 1.02 * results["round robin"].steady_per_s


def test_the_same_rollout_has_the_same_times_under_every_policy() -> None:
    own = simulated(rollouts=500)
    coupled = simulated(rollouts=500, coupled=True)
    work = [result.pool("run").mean_in_use * result.virtual_s for result in (own, coupled)]
    assert work[0] == pytest.approx(work[1])


def test_mixed_workloads_go_by_their_weights() -> None:
    kinds = {"short": WorkloadConfig(3.0, run="1"), "long": WorkloadConfig(1.0, run="50", eval="20")}
    result = simulated(rollouts=4000, slots=16, workloads=kinds, eval="constant:2")
    mean_run_s = result.pool("run").mean_in_use * result.virtual_s / 4000
    mean_eval_s = result.pool("eval").mean_in_use * result.virtual_s / 4000
    assert mean_run_s == pytest.approx(0.75 * 1 + 0.25 * 50, rel=0.06)
    assert (mean_run_s - 1) / 49 == pytest.approx((mean_eval_s - 2) / 18)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="servers=0"):
        simulated(servers=0)
