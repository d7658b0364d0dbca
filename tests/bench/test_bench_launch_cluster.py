"""The parts of `bench launch` that need a cluster, in small, on one of their own."""

from __future__ import annotations

import pytest

from prorl_hpc.bench import launch_requeues, launch_start
from prorl_hpc.slurm.private.base import missing

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing("namespaced")), reason=f"no private Slurm cluster: {missing('namespaced')}"),
]


def test_the_start_is_timed_new_and_requeued() -> None:
    found = launch_start.measure(1, print)
    own = [figure.value for figure in found if figure.goal]
    assert len(own) == 2
    assert all(value is not None and value > 0 for value in own)


def test_two_requeues_lose_nothing() -> None:
    found = launch_requeues.measure(2, print)
    assert [figure.name for figure in found if figure.holds is False] == []
    assert found[0].value is not None and found[0].value >= 2
