"""When every group of one step after another breaks or is too old, the run is ended: it would use up its allocation for nothing."""

from __future__ import annotations

from prorl_hpc.messages.batch import BatchResult
from prorl_hpc.messages.errors import RunError

STEPS = 3
"""In a row, after all retries of their rollouts, or without one group that is new enough: that does not mend by itself."""


class BrokenSteps:
    """Of one attempt."""

    def __init__(self) -> None:
        self._in_a_row = self._stale_in_a_row = 0

    def count(self, result: BatchResult, stale_groups: int) -> None:
        """RunError at the ``STEPS``-th step in a row of which every group broke, with a rollout's own words, or every accepted
        group was too old."""
        progress = result.progress
        self._stale_in_a_row = self._stale_in_a_row + 1 if stale_groups and stale_groups >= progress.accepted else 0
        if self._stale_in_a_row >= STEPS:
            raise RunError(
                f"every group of the last {STEPS} steps had tokens older than trainer.staleness allows, so there is nothing to train "
                "on: rollouts outlast that many updates. Raise trainer.staleness, or make them shorter or faster "
                "(trainer.max_parallel_groups, more servers). Batches that are recorded stay too old: go on with "
                "`prorl-hpc resume --fresh trainer.staleness=…`, which has them made anew"
            )
        if progress.accepted or progress.uniform or not progress.broken:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < STEPS:
            return
        failures = [r.failure for group in result.groups for r in group.rollouts if r.failure is not None]
        words = f"; one of their rollouts: {failures[0].kind}: {failures[0].message}" if failures else ""
        raise RunError(f"every group of the last {STEPS} steps broke, so there is nothing to train on{words}")
