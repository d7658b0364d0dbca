"""A scheduler with one worker and one server."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.worker()
    made.server()
    return made
