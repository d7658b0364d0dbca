"""Batches and single rollouts on their way: who ordered which rollout, and what its end means."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prorl_hpc.core.groups import BatchSampler, Moves
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.rollout.ledger import Ledger
from prorl_hpc.service.errors import conflict

_SHOWN_FINISHED = 3
_KEPT_BATCHES = 8
_KEPT_ROLLOUTS = 2000
_KEPT_IDS = 100_000


class Orders:
    """``on_batch`` is called once with every batch that is over."""

    def __init__(self, on_batch: Callable[[BatchResult], None]) -> None:
        self._on_batch = on_batch
        self.batches: Ledger[BatchResult] = Ledger("batch", keep_results=_KEPT_BATCHES, keep_ids=_KEPT_IDS)
        self.rollouts: Ledger[RolloutResult] = Ledger("rollout", keep_results=_KEPT_ROLLOUTS, keep_ids=_KEPT_IDS)
        self._running: dict[str, BatchSampler] = {}
        self._batch_of: dict[str, str] = {}
        self._over: dict[str, BatchProgress] = {}
        self._ends: dict[str, RolloutProgress] = {}
        self._recent: deque[BatchProgress] = deque(maxlen=_SHOWN_FINISHED)

    # batches

    def begin_batch(self, spec: BatchSpec, now: float) -> Moves:
        """A new batch starts; nothing to do if it is known. Raises 409."""
        if not self.batches.is_new(spec.batch_id, spec):
            return Moves()
        self.batches.open(spec.batch_id, spec)
        sampler = self._running[spec.batch_id] = BatchSampler(spec, now)
        return self._note(spec.batch_id, sampler.begin())

    def batch_progress(self, batch_id: str) -> BatchProgress:
        self.batches.finished(batch_id)
        running = self._running.get(batch_id)
        return running.progress() if running is not None else self._over[batch_id]

    def cancel_batch(self, batch_id: str, now: float) -> Moves:
        """Raises 404, and 409 if it has ended otherwise."""
        running = self._running.get(batch_id)
        if running is not None:
            return running.cancel(now)
        progress = self.batch_progress(batch_id)
        if progress.state != "cancelled":
            message = f"batch {batch_id!r} is over ({progress.state}): there is nothing to cancel"
            raise conflict(message, "already_finished", state=progress.state)
        return Moves()

    def shown(self) -> list[BatchProgress]:
        """Running batches, oldest first, then the last few that are over, newest first."""
        return [sampler.progress() for sampler in self._running.values()] + list(self._recent)

    # single rollouts

    def begin_rollouts(self, specs: list[RolloutSpec]) -> Moves:
        """Start those that are new. Raises 409, and then starts none."""
        new = [spec for spec in specs if self.rollouts.is_new(spec.rollout_id, spec)]
        taken = [spec.rollout_id for spec in new if spec.rollout_id in self._batch_of]
        if taken:
            raise conflict(f"rollout {taken[0]!r} belongs to a running batch: choose another id", "rollout_differs")
        for spec in new:
            self.rollouts.open(spec.rollout_id, spec)
        return Moves(submit=tuple(new))

    def ended_rollout(self, rollout_id: str) -> RolloutProgress:
        """Where a finished single rollout stands. Raises 404."""
        self.rollouts.finished(rollout_id)
        return self._ends[rollout_id]

    # results

    def ended(self, result: RolloutResult, now: float) -> Moves:
        """A rollout ended; returns what that entails."""
        rollout_id = result.rollout_id
        batch_id = self._batch_of.pop(rollout_id, None)
        if batch_id is None:
            self._ends[rollout_id] = RolloutProgress(
                rollout_id, result.status, result.attempts, result.worker, result.server
            )
            self.rollouts.finish(rollout_id, result)
            _drop_oldest(self._ends, _KEPT_IDS)
            return Moves()
        sampler = self._running[batch_id]
        moves = self._note(batch_id, sampler.finished(result, now))
        if sampler.finished_all:
            self._finish_batch(batch_id, sampler)
        return moves

    def close(self) -> None:
        self.batches.close()
        self.rollouts.close()

    def _note(self, batch_id: str, moves: Moves) -> Moves:
        for spec in moves.submit:
            self._batch_of[spec.rollout_id] = batch_id
        return moves

    def _finish_batch(self, batch_id: str, sampler: BatchSampler) -> None:
        result = sampler.result()
        del self._running[batch_id]
        self._over[batch_id] = result.progress
        _drop_oldest(self._over, _KEPT_IDS)
        self._recent.appendleft(result.progress)
        self.batches.finish(batch_id, result)
        self._on_batch(result)


def _drop_oldest(kept: dict[str, BatchProgress] | dict[str, RolloutProgress], limit: int) -> None:
    if len(kept) > limit:
        del kept[next(iter(kept))]
