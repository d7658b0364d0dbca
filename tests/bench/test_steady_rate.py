from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.steady_rate import Spans, span, steady_error, steady_rate
from prorl_hpc.messages.rollout import Stage, StageTiming

SLOTS = {"init": 4, "run": 2, "eval": 100}


def one_after_the_other(count: int, run_s: float, eval_s: float = 0.0) -> Spans:
    """Two RUN slots that are never empty; INIT takes no time."""
    ended = [run_s * (number // 2 + 1) for number in range(count)]
    return np.array([span(at + eval_s, [timing(Stage.RUN, run_s), timing(Stage.EVAL, eval_s)]) for at in ended])


def timing(stage: Stage, busy_s: float, queued_s: float = 0.0) -> StageTiming:
    return StageTiming(stage, queued_s, busy_s)


def test_a_span_is_counted_back_from_the_end() -> None:
    timings = [timing(Stage.INIT, 1.0, 9.0), timing(Stage.RUN, 3.0, 2.0), timing(Stage.EVAL, 4.0, 0.5)]
    assert span(20.0, timings) == (9.5, 10.5, 12.5, 15.5, 16.0, 20.0)
    assert span(20.0, timings[:1]) == (19.0, 20.0, 20.0, 20.0, 20.0, 20.0)


def test_it_is_what_the_fullest_pool_gets_through() -> None:
    found = steady_rate(one_after_the_other(40, 4.0), SLOTS)
    assert found is not None and found[2] == pytest.approx(0.5)


def test_it_ends_when_no_run_begins_any_more() -> None:
    """However long the evaluations take that are still under way then."""
    spans = one_after_the_other(40, 4.0)
    spans[20:, 5] += 500.0
    found = steady_rate(spans, SLOTS)
    assert found is not None
    assert found[1] == 76.0 and found[2] == pytest.approx(0.5)


def test_slow_evaluations_that_fill_their_pool_are_the_rate() -> None:
    began = np.arange(40) // 2 * 10.0
    spans = np.stack([began * 0, began * 0, began * 0.1, began * 0.1 + 1.0, began + 1, began + 11], axis=1)
    spans[-1, 2] = 400.0  # a RUN that begins late
    found = steady_rate(spans, {"init": 4, "run": 4, "eval": 2})
    assert found is not None and found[2] == pytest.approx(0.2)


def test_coupled_slots_are_held_from_init_to_eval() -> None:
    spans = one_after_the_other(40, 4.0)
    spans[:, 0] = spans[:, 1] = spans[:, 2]
    found = steady_rate(spans, {"run": 2}, coupled=True)
    assert found is not None and found[2] == pytest.approx(0.5)


@pytest.mark.parametrize("spans", [one_after_the_other(2, 3.0), one_after_the_other(4, 0.0)])
def test_too_few_rollouts_have_none(spans: Spans) -> None:
    assert steady_rate(spans, SLOTS) is None


@given(st.lists(st.tuples(*[st.integers(0, 10**4)] * 6).map(np.cumsum), min_size=3, max_size=20))
def test_it_is_a_rate_of_some_pool_within_the_whole_time(rows: list[Spans]) -> None:
    found = steady_rate(np.array(rows), SLOTS)
    if found is not None:
        first, last, rate = found
        assert min(row[5] for row in rows) <= first < last <= max(row[2] for row in rows)
        assert 0 < rate * (last - first) <= len(rows) + 1e-6


def test_a_system_that_loses_nothing_is_as_fast_on_eight_nodes_as_eight_times_on_one() -> None:
    """However long the slowest evaluations are, in which the system runs dry: over seeds the mean is 1."""

    def rate(nodes: int, seed: int) -> float:
        rng = np.random.default_rng(seed)
        base = np.stack([rng.lognormal(np.log(s), sigma, 96) for s, sigma in ((2, 0.5), (20, 0.3), (12, 0.6))], axis=1)
        config = SimulationConfig(
            rollouts=96 * nodes,
            nodes=nodes,
            slots=4,
            init_slots=2,
            ready_slots=4,
            eval_slots=16,
            servers=nodes,
            plot="",
        )
        return simulate(config, times=np.concatenate([base] * nodes)).steady_per_s

    ratios = [rate(8, seed) / 8 / rate(1, seed) for seed in range(8)]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_rollouts_that_are_all_alike_leave_no_error() -> None:
    assert steady_error(one_after_the_other(40, 4.0), SLOTS) == pytest.approx(0.0, abs=1e-9)
    assert steady_error(one_after_the_other(2, 4.0), SLOTS) is None


def in_this_order(run_s: Sequence[float]) -> Spans:
    """Four RUN slots that are never empty."""
    free, rows = [0.0] * 4, []
    for seconds in run_s:
        slot = int(np.argmin(free))
        began = free[slot]
        free[slot] += seconds
        rows.append((0.0, 0.0, began, free[slot], free[slot], free[slot]))
    return np.array(rows)


@pytest.mark.parametrize("count", [24, 200])
def test_the_error_is_that_of_the_same_rollouts_in_many_orders(count: int) -> None:
    draws = np.random.default_rng(0)
    run_s = draws.lognormal(0.0, 0.6, count)
    rates, errors = [], []
    for _ in range(200):
        spans = in_this_order(draws.permutation(run_s))
        found, error = steady_rate(spans, {"run": 4}), steady_error(spans, {"run": 4})
        assert found is not None and error is not None
        rates.append(found[2])
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(rates) / np.mean(rates), rel=0.3)
