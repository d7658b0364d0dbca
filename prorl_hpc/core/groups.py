"""The group sampler (DAPO, arXiv 2503.14476, §3.2): which prompts to start, which groups count.

The samples of one prompt form a group. A group whose rewards are all equal has no gradient; it is dropped and
replaced at once from the supply of prompts. When the wanted number of groups is there, the rest is cancelled, or
carried on to the next batch with all that it has.

A sampler is a function of its order, the groups that it took over and the results that it was told, in their order:
telling them again rebuilds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.batch import (
    BatchProgress,
    BatchResult,
    BatchSpec,
    BatchState,
    GroupFilter,
    GroupOutcome,
    GroupResult,
    Refill,
    WhenFull,
)
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status

_SAME_REWARD = 1e-9
"""Rewards this close are equal: sums in another order must not make a group informative."""


@dataclass(frozen=True)
class Moves:
    """What a batch wants next."""

    submit: tuple[RolloutSpec, ...] = ()
    cancel: tuple[str, ...] = ()


@dataclass(frozen=True)
class CarriedGroup:
    """A group that an earlier batch started and that a later one takes over. ``row_index`` is its prompt's place in
    the rows of ``carried_from``."""

    carried_from: str
    group_id: str
    row_index: int
    specs: tuple[RolloutSpec, ...]


@dataclass
class _Group:
    group_id: str
    row_index: int
    specs: tuple[RolloutSpec, ...]
    carried_from: str = ""
    rollouts: dict[int, RolloutResult] = field(default_factory=dict)
    outcome: GroupOutcome | None = None

    @property
    def whole(self) -> bool:
        return len(self.rollouts) == len(self.specs)

    @property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(spec.rollout_id for spec in self.specs if spec.sample not in self.rollouts)


class BatchSampler:
    """One batch. ``begin`` once, then ``finished`` for every rollout's result, in any order; each says what to do."""

    def __init__(
        self,
        spec: BatchSpec,
        now: float,
        carried: Iterable[CarriedGroup] = (),
        before: Iterable[RolloutResult] = (),
        choice: PolicyChoice | None = None,
    ) -> None:
        """``carried``: groups taken over, whose rollouts are under way; ``before``: what they have so far. ``choice``:
        the policy of each group of an order for ``any``."""
        self.spec = spec
        self._choice = choice or PolicyChoice()
        self.state = BatchState.RUNNING
        self._began = self._ended = now
        self._groups = [_Group(c.group_id, c.row_index, c.specs, c.carried_from) for c in carried]
        self._in_flight = {group.group_id: group for group in self._groups}
        self._carried_in = len(self._groups)
        self._parked: dict[str, _Group] = {}
        self._rows_used = 0
        self._outcomes = dict.fromkeys(GroupOutcome, 0)
        self._done = self._failed = 0
        for result in before:
            self._note(self._in_flight[result.group_id], result)

    def begin(self, now: float) -> Moves:
        for group in [group for group in self._groups if group.whole]:
            self._close(group)
        return self._go_on(now)

    def finished(self, result: RolloutResult, now: float) -> Moves:
        """A sample of this batch ended; its ``group_id`` and ``sample`` say which. Saying it twice changes nothing."""
        group = self._in_flight.get(result.group_id) or self._parked.get(result.group_id)
        if group is None or result.sample in group.rollouts:
            return Moves()
        self._note(group, result)
        if not group.whole or group.group_id in self._parked:
            return Moves()
        self._close(group)
        return self._go_on(now)

    def cancel(self, now: float) -> Moves:
        """End the batch; what it has stays in the result. A batch that is over stays as it is."""
        if self.state is not BatchState.RUNNING:
            return Moves()
        self.state, self._ended = BatchState.CANCELLED, now
        return self._cancel_unfinished()

    @property
    def finished_all(self) -> bool:
        """The batch is over and so is every rollout that it started, but for those that it carries on."""
        return self.state is not BatchState.RUNNING and not self._in_flight

    @property
    def under_way(self) -> list[RolloutSpec]:
        """The rollouts that have not ended, those of groups that are carried on too."""
        groups = (*self._in_flight.values(), *self._parked.values())
        return [spec for group in groups for spec in group.specs if spec.sample not in group.rollouts]

    @property
    def carries_on(self) -> bool:
        """It is full, and has groups that wait to be taken over."""
        return bool(self._parked)

    def hand_over(self) -> tuple[list[CarriedGroup], list[RolloutResult]]:
        """The groups that it carries on, no longer its own, and the results that they have."""
        groups = [_carried(self.spec.batch_id, group) for group in self._parked.values()]
        results = [result for group in self._parked.values() for result in group.rollouts.values()]
        self._parked = {}
        return groups, results

    def progress(self) -> BatchProgress:
        return BatchProgress(
            batch_id=self.spec.batch_id,
            state=self.state if self.finished_all else BatchState.RUNNING,
            groups_wanted=self.spec.groups_wanted,
            accepted=self._outcomes[GroupOutcome.ACCEPTED],
            uniform=self._outcomes[GroupOutcome.UNIFORM],
            broken=self._outcomes[GroupOutcome.BROKEN],
            in_flight=len(self._in_flight),
            rollouts_done=self._done,
            rollouts_failed=self._failed,
            rows_used=self._rows_used,
            carried_in=self._carried_in,
        )

    def result(self) -> BatchResult:
        """Every group, those taken over first, then by row. Groups that are carried on come without their rollouts."""
        groups = [
            GroupResult(
                group_id=group.group_id,
                row_index=group.row_index,
                outcome=group.outcome or GroupOutcome.CANCELLED,
                rollouts=[group.rollouts[sample] for sample in sorted(group.rollouts)]
                if group.outcome is not GroupOutcome.CARRIED
                else [],
                carried_from=group.carried_from,
            )
            for group in self._groups
        ]
        return BatchResult(self.progress(), groups, self._ended - self._began)

    def _note(self, group: _Group, result: RolloutResult) -> None:
        group.rollouts[result.sample] = result
        self._done += result.status is Status.DONE
        self._failed += result.status in (Status.FAILED, Status.TIMED_OUT)

    def _close(self, group: _Group) -> None:
        del self._in_flight[group.group_id]
        group.outcome = self._judge(group)
        self._outcomes[group.outcome] += 1

    def _judge(self, group: _Group) -> GroupOutcome:
        results = group.rollouts.values()
        rewards = [r.reward for r in results if r.status is Status.DONE and r.reward is not None]
        if self.state is not BatchState.RUNNING:
            return GroupOutcome.CANCELLED
        # Samples that broke are no statement about the prompt: they are left out, and too few left is no group.
        if len(rewards) < min(self.spec.min_usable_samples, len(group.specs)):
            return GroupOutcome.BROKEN
        if self.spec.filter is GroupFilter.INFORMATIVE and max(rewards) - min(rewards) <= _SAME_REWARD:
            return GroupOutcome.UNIFORM
        return GroupOutcome.ACCEPTED

    def _go_on(self, now: float) -> Moves:
        if self.state is not BatchState.RUNNING:
            if not self._in_flight:
                self._ended = now
            return Moves()
        if self._outcomes[GroupOutcome.ACCEPTED] >= self.spec.groups_wanted:
            self.state, self._ended = BatchState.DONE, now
            return self._park() if self.spec.when_full is WhenFull.CARRY else self._cancel_unfinished()
        submit = self._start_groups()
        if not self._in_flight:
            self.state, self._ended = BatchState.EXHAUSTED, now
        return Moves(submit=submit)

    def _park(self) -> Moves:
        self._parked, self._in_flight = self._in_flight, {}
        for group in self._parked.values():
            group.outcome = GroupOutcome.CARRIED
        return Moves()

    def _cancel_unfinished(self) -> Moves:
        return Moves(cancel=tuple(name for group in self._in_flight.values() for name in group.unfinished))

    def _start_groups(self) -> tuple[RolloutSpec, ...]:
        """As many groups as are still wanted, and those that ``max_parallel_groups`` allows beyond ``groups_wanted``
        as spares, so that a batch need not wait for its slowest group."""
        if self.spec.refill is Refill.IN_ROUNDS and self._in_flight:
            return ()
        wanted = self.spec.groups_wanted
        limit = self.spec.max_parallel_groups or wanted
        target = min(limit, wanted - self._outcomes[GroupOutcome.ACCEPTED] + max(0, limit - wanted))
        started: list[RolloutSpec] = []
        while len(self._in_flight) < target and self._rows_used < len(self.spec.rows):
            group = self._new_group(self._rows_used)
            self._rows_used += 1
            self._groups.append(group)
            self._in_flight[group.group_id] = group
            started += group.specs
        return tuple(started)

    def _new_group(self, row_index: int) -> _Group:
        spec = self.spec
        group_id = f"{spec.batch_id}.g{row_index}"
        policy = self._choice.resolve(spec.policy, group_id)
        specs = tuple(
            RolloutSpec(
                rollout_id=f"{group_id}.s{sample}",
                task=spec.task,
                row=spec.rows[row_index],
                group_id=group_id,
                sample=sample,
                sampling=spec.sampling,
                budgets=spec.budgets,
                priority=spec.priority,
                policy=policy,
                client=spec.client,
            )
            for sample in range(spec.group_size)
        )
        return _Group(group_id, row_index, specs)


def _carried(batch_id: str, group: _Group) -> CarriedGroup:
    return CarriedGroup(group.carried_from or batch_id, group.group_id, group.row_index, group.specs)
