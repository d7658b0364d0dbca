"""What the soak calls lost, and what twice."""

from __future__ import annotations

from collections import Counter

from prorl_hpc.bench.soak import SoakCount, SoakPlan, figures


def counted(seen: list[str]) -> SoakCount:
    whole = Counter({f"soak-{number}": 1 for number in range(4)})
    statuses = Counter({"done": 4})
    return SoakCount(Counter(seen), whole.copy(), whole.copy(), statuses, 5, [(1.0, "worker-0"), (2.0, "coordinator")])


def test_all_is_well() -> None:
    found = figures(SoakPlan(rollouts=4), counted([f"soak-{number}" for number in range(4)]))
    assert all(figure.holds for figure in found)
    assert "1 of workers, 1 of the coordinator" in found[0].detail


def test_lost_twice_and_unknown() -> None:
    found = {f.name: f.value for f in figures(SoakPlan(rollouts=4), counted(["soak-0", "soak-0", "soak-1", "soak-9"]))}
    assert found["lost (stream)"] == 2
    assert found["delivered twice (stream)"] == 1
    assert found["unknown ids (stream)"] == 1
    assert found["lost (journal)"] == 0
