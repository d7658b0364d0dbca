"""The soak in small: real processes, SIGKILL, nothing lost and nothing twice."""

from __future__ import annotations

import pytest

from prorl_hpc.bench.soak import SoakPlan, figures, soak


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nothing_is_lost_or_delivered_twice() -> None:
    plan = SoakPlan(
        rollouts=1_500,
        workers=3,
        worker_kill_s=(0.8, 1.6),
        run_s=0.3,  # so that every kill hits rollouts in RUN
        coordinator_kills=1,
        in_flight=300,
        reconnect_every=400,
        seed=1,
    )
    count = soak(plan, print)
    assert {figure.name: figure.value for figure in figures(plan, count) if not figure.holds} == {}
    assert count.killed("coordinator") == 1 and count.killed("worker") >= 1
    assert count.attempts > plan.rollouts  # kills hit rollouts under way, which were begun again
