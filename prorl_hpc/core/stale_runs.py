"""RUNs of cancelled rollouts that go on nevertheless (rollout.abort_cancelled=false, to compare with).

The rollout has ended, and nobody waits for what its RUN comes to; that holds its slot and its LLM server to its end, or
to that of its budget. Whatever else befalls it, a lost server or a Hello of its worker, ends it as a discard does.
"""

from __future__ import annotations

from prorl_hpc.core.life import Life
from prorl_hpc.core.placement import Placement
from prorl_hpc.messages.control import StageFinished
from prorl_hpc.messages.rollout import Stage


class StaleRuns:
    """Empty for ever where cancelled work is stopped at once."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._worker_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._worker_of)

    def let_go_on(self, life: Life) -> None:
        """``life`` is in RUN and is about to end."""
        del self._placement.attempts[life.attempt_id]
        self._worker_of[life.attempt_id] = life.worker

    def finished(self, event: StageFinished, now: float) -> None:
        """A report of an attempt that is not wanted; others than those here are passed over."""
        if event.stage is Stage.RUN and self._worker_of.get(event.rollout_id) == event.worker_id:
            if event.failure is None:
                self.end(event.rollout_id, now)
            else:  # its worker has freed it by itself
                self.forget(event.rollout_id)
                self._placement.gone(event.worker_id, event.rollout_id)

    def end(self, attempt_id: str, now: float) -> bool:
        """Have its worker give it up; False, and nothing is done, if it is none of these."""
        worker_id = self.forget(attempt_id)
        if worker_id is not None:
            self._placement.order_discard(worker_id, attempt_id, now)
        return worker_id is not None

    def forget(self, attempt_id: str) -> str | None:
        """It is over, or its worker is lost; returns the worker."""
        worker_id = self._worker_of.pop(attempt_id, None)
        if worker_id is not None:
            self._placement.servers.release(attempt_id)
        return worker_id
