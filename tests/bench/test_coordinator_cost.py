"""What a saturated coordinator costs, measured with real processes, and what follows for many nodes."""

from __future__ import annotations

import pytest

from prorl_hpc.bench.coordinator_cost import saturated_coordinator
from prorl_hpc.bench.scaling_simulated import Coordinator


def test_it_is_measured_with_trajectories_of_the_given_length() -> None:
    told: list[str] = []
    found = saturated_coordinator(2500, 2.0, told.append, rollouts=300)
    assert 0 < found.rollout_s < 0.1 and found.idle == 0.0
    assert found.agent_s == pytest.approx(found.rollout_s / 6)
    assert "2500 tokens" in found.how and "300 rollouts" in told[0]


def test_heartbeats_of_many_nodes_leave_less_for_rollouts() -> None:
    coordinator = Coordinator(0.001, 0.1, "", agent_s=0.0001)
    assert coordinator.at_rest(1000) == pytest.approx(0.3)
    assert coordinator.message_s(1000) == pytest.approx(0.001 / 0.7)
    assert coordinator.at_rest(10**6) < 1.0
    assert coordinator.most_nodes(0.4) == pytest.approx(0.9 / (0.0002 + 0.0004))
