from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.steady_rate import steady_rate


def test_it_leaves_out_the_first_tenth_and_the_last() -> None:
    ended = [float(n) for n in range(1, 11)]
    assert steady_rate(ended, [20.0]) == (2.0, 9.0, 1.0)


def test_it_ends_when_no_run_begins_any_more() -> None:
    """Two a second while there is work; then those that take long, one every ten seconds."""
    ended = [n / 2 for n in range(1, 41)] + [30.0, 40.0, 50.0]
    found = steady_rate(ended, [*np.arange(0.0, 20.5, 0.5)])
    assert found is not None
    assert found[2] == pytest.approx(2.0) and found[1] == 19.5


@pytest.mark.parametrize(
    ("ended", "began"), [([3.0], [1.0]), ([4.0] * 5, [1.0] * 5), ([5.0, 6.0, 7.0, 8.0], [0.0] * 4)]
)
def test_too_few_rollouts_have_none(ended: list[float], began: list[float]) -> None:
    assert steady_rate(ended, began) is None


@given(st.lists(st.floats(0, 1e6), min_size=3), st.lists(st.floats(0, 1e6), min_size=1))
def test_it_counts_what_ended_between(ended: list[float], began: list[float]) -> None:
    found = steady_rate(sorted(ended), began)
    if found is not None:
        first, last, rate = found
        assert rate * (last - first) == pytest.approx(sum(first < at <= last for at in ended))
        assert rate > 0 and last <= max(began)


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
