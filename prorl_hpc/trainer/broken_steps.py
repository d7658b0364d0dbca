"""When every group of one step after another breaks, the run is ended: it would use up its allocation for nothing."""

from __future__ import annotations

from prorl_hpc.messages.batch import BatchResult
from prorl_hpc.messages.errors import RunError

STEPS = 3
"""In a row, after all retries of their rollouts: that does not mend by itself."""


class BrokenSteps:
    """Of one attempt."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, result: BatchResult) -> None:
        """RunError, with a rollout's own words, at the ``STEPS``-th step in a row of which every group broke."""
        progress = result.progress
        if progress.accepted or progress.uniform or not progress.broken:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < STEPS:
            return
        failures = [r.failure for group in result.groups for r in group.rollouts if r.failure is not None]
        words = f"; one of their rollouts: {failures[0].kind}: {failures[0].message}" if failures else ""
        raise RunError(f"every group of the last {STEPS} steps broke, so there is nothing to train on{words}")
