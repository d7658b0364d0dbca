"""Batches and single rollouts on their way: who ordered which rollout, and what its end means. No disk, no clock.

Only what has not ended is here; the journal has the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from dataclasses import replace as replaced

from msgspec.structs import replace

from prorl_hpc.core.events import Unfinished
from prorl_hpc.core.groups import BatchSampler, CarriedGroup, Moves
from prorl_hpc.core.policy_choice import ANY, PolicyChoice
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState, WhenFull
from prorl_hpc.messages.rollout import Budgets, RolloutResult, RolloutSpec
from prorl_hpc.rollout.journal_records import OpenBatch, OpenRollout

_SHOWN_FINISHED = 3

Likeness = tuple[str, str, str, int]
"""Batches that can carry groups on to one another: (client, task, policy, group size)."""


@dataclass(frozen=True)
class Over:
    """A batch that is over. ``carries_on``: groups of it wait for the next batch."""

    result: BatchResult
    carries_on: bool


@dataclass(frozen=True)
class Resumed:
    """What the orders of an earlier process want: rollouts that are to go on, then ``moves``; batches that are over by
    what is recorded; and those that are asleep."""

    under_way: tuple[Unfinished, ...]
    moves: Moves
    over: tuple[Over, ...]
    asleep: tuple[str, ...]


class Orders:
    """``budgets``: those of specs that have none. ``choice``: the policies of those that name ``any``."""

    def __init__(self, budgets: Budgets, choice: PolicyChoice | None = None) -> None:
        self._budgets = budgets
        self._choice = choice or PolicyChoice()
        self._batches: dict[str, BatchSampler] = {}
        """Running ones, and full ones whose groups go on, in the order of their acceptance."""
        self._early: dict[str, list[RolloutResult]] = {}
        """Results of groups whose new batch is still being accepted."""
        self._batch_of: dict[str, str] = {}
        self._asleep: set[str] = set()
        self._recent: deque[BatchProgress] = deque(maxlen=_SHOWN_FINISHED)

    # batches

    def running(self, batch_id: str) -> BatchSampler | None:
        """A batch that is not over."""
        sampler = self._batches.get(batch_id)
        return sampler if sampler is not None and not sampler.finished_all else None

    def batch_of(self, rollout_id: str) -> str:
        """The batch that a living rollout belongs to; empty for one by itself."""
        return self._batch_of.get(rollout_id, "")

    def take_over(self, spec: BatchSpec) -> tuple[str, list[CarriedGroup], list[RolloutResult]]:
        """The groups that a batch like ``spec`` carries on, from now on ``spec``'s: (whose they were, groups, their
        results so far). ``begin_batch`` follows when the order is on disk; what ends meanwhile is kept for it."""
        like = _likeness(spec)
        parked = (s for s in self._batches.values() if s.carries_on and _likeness(s.spec) == like)
        sampler = next(parked, None) if spec.when_full is WhenFull.CARRY else None
        if sampler is None:
            return "", [], []
        del self._batches[sampler.spec.batch_id]
        if sampler.spec.batch_id in self._asleep:
            self._asleep.remove(sampler.spec.batch_id)
            self._asleep.add(spec.batch_id)
        left = [rollout.rollout_id for rollout in sampler.under_way]
        self._batch_of.update(dict.fromkeys(left, spec.batch_id))
        self._early[spec.batch_id] = []
        return sampler.spec.batch_id, *sampler.hand_over()

    def begin_batch(
        self, spec: BatchSpec, now: float, carried: Iterable[CarriedGroup] = (), before: Iterable[RolloutResult] = ()
    ) -> tuple[Moves, Over | None]:
        sampler = self._open(spec, now, carried, before)
        moves = [self._note(sampler, sampler.begin(now))]
        for result in self._early.pop(spec.batch_id, ()):
            moves.append(self._note(sampler, sampler.finished(result, now)))
        submit = tuple(spec for move in moves for spec in move.submit)
        cancel = tuple(name for move in moves for name in move.cancel)
        return Moves(submit, cancel), self._over_if(sampler)

    def cancel_batch(self, batch_id: str, now: float) -> tuple[Moves, Over | None]:
        """Of a running batch."""
        sampler = self._batches[batch_id]
        return sampler.cancel(now), self._over_if(sampler)

    def shown(self) -> list[BatchProgress]:
        """Running batches, oldest first, then the last few that are over, newest first."""
        running = [sampler.progress() for sampler in self._batches.values() if not sampler.finished_all]
        return running + list(self._recent)

    # single rollouts

    def begin_rollouts(self, specs: Iterable[RolloutSpec]) -> Moves:
        return Moves(submit=tuple(self._filled(spec) for spec in specs))

    # results

    def ended(self, result: RolloutResult, now: float) -> tuple[str, Moves, Over | None]:
        """A rollout ended: its batch (empty if it was by itself), what that wants, and whether it is over thereby."""
        batch_id = self._batch_of.pop(result.rollout_id, "")
        if not batch_id:
            return "", Moves(), None
        if batch_id in self._early:
            self._early[batch_id].append(result)
            return batch_id, Moves(), None
        sampler = self._batches[batch_id]
        was_over = sampler.finished_all
        moves = self._note(sampler, sampler.finished(result, now))
        return batch_id, moves, None if was_over else self._over_if(sampler)

    # after a restart

    def resume(
        self,
        found: Iterable[OpenBatch | OpenRollout],
        now: float,
        *,
        cut_off: bool = False,
        sleeping: Collection[str] = (),
    ) -> Resumed:
        """Rebuild what an earlier process had; the batches are told their recorded results in the recorded order.
        ``cut_off``: that was in another attempt of the run, of which nothing is left under way. Each rollout gets a new
        attempt, for which it does not pay; and batches of policies in ``sleeping`` sleep until somebody asks for them."""
        under_way: list[Unfinished] = []
        cancel: list[str] = []
        over: list[Over] = []
        for order in found:
            if isinstance(order, OpenRollout):
                under_way.append(Unfinished(self._filled(order.spec), order.attempt, order.spared))
                continue
            sampler = self._rebuilt(order, now)
            left = sampler.under_way
            self._batch_of.update(dict.fromkeys((spec.rollout_id for spec in left), order.spec.batch_id))
            goes_on = sampler.state is BatchState.RUNNING or sampler.carries_on
            asleep = goes_on and (order.asleep or (cut_off and order.spec.policy in sleeping))
            for spec in left:
                name = spec.rollout_id
                under_way.append(Unfinished(spec, order.attempts.get(name, 1), order.spared.get(name, 0), asleep))
            if asleep:
                self._asleep.add(order.spec.batch_id)
            if not goes_on:
                cancel += [spec.rollout_id for spec in left]
            ended = self._over_if(sampler)
            if ended is not None and order.state == "running":
                over.append(ended)
        if cut_off:
            under_way = [replaced(one, attempt=one.attempt + 1, spared=one.spared + 1) for one in under_way]
        return Resumed(tuple(under_way), Moves(cancel=tuple(cancel)), tuple(over), tuple(sorted(self._asleep)))

    def wake(self, batch_id: str) -> tuple[str, ...]:
        """Somebody asks for the batch: the rollouts of it that slept, if it did."""
        if batch_id not in self._asleep:
            return ()
        self._asleep.remove(batch_id)
        return tuple(name for name, batch in self._batch_of.items() if batch == batch_id)

    def _rebuilt(self, order: OpenBatch, now: float) -> BatchSampler:
        sampler = self._open(order.spec, now, order.carried, order.before)
        sampler.begin(now)
        for entry in order.log:
            if entry is None:
                sampler.cancel(now)
            else:
                sampler.finished(entry, now)
        return sampler

    def _open(
        self, spec: BatchSpec, now: float, carried: Iterable[CarriedGroup], before: Iterable[RolloutResult]
    ) -> BatchSampler:
        filled = spec if spec.budgets is not None else replace(spec, budgets=self._budgets)
        sampler = self._batches[spec.batch_id] = BatchSampler(filled, now, carried, before, self._choice)
        return sampler

    def _note(self, sampler: BatchSampler, moves: Moves) -> Moves:
        for spec in moves.submit:
            self._batch_of[spec.rollout_id] = sampler.spec.batch_id
        return moves

    def _over_if(self, sampler: BatchSampler) -> Over | None:
        """What a batch that is over leaves; it is forgotten here unless groups of it go on."""
        if not sampler.finished_all:
            return None
        result = sampler.result()
        self._recent.appendleft(result.progress)
        if not sampler.carries_on:
            del self._batches[sampler.spec.batch_id]
        return Over(result, sampler.carries_on)

    def _filled(self, spec: RolloutSpec) -> RolloutSpec:
        if spec.policy == ANY:
            spec = replace(spec, policy=self._choice.resolve(ANY, spec.group_id or spec.rollout_id))
        return spec if spec.budgets is not None else replace(spec, budgets=self._budgets)


def _likeness(spec: BatchSpec) -> Likeness:
    return spec.client, spec.task, spec.policy, spec.group_size
