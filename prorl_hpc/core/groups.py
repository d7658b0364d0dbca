"""The group sampler (DAPO, arXiv 2503.14476, §3.2): which prompts to start, which groups count.

The samples of one prompt form a group. A group whose rewards are all equal has no gradient; it is dropped and
replaced at once from the supply of prompts. When the wanted number of groups is there, the rest is cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prorl_hpc.messages.batch import (
    BatchProgress,
    BatchResult,
    BatchSpec,
    BatchState,
    GroupFilter,
    GroupOutcome,
    GroupResult,
)
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status

_SAME_REWARD = 1e-9
"""Rewards this close are equal: sums in another order must not make a group informative."""


@dataclass(frozen=True)
class Moves:
    """What a batch wants next."""

    submit: tuple[RolloutSpec, ...] = ()
    cancel: tuple[str, ...] = ()


@dataclass
class _Group:
    row_index: int
    rollouts: dict[int, RolloutResult] = field(default_factory=dict)
    outcome: GroupOutcome | None = None


class BatchSampler:
    """One batch. ``begin`` once, then ``finished`` for every rollout's result, in any order; each says what to do."""

    def __init__(self, spec: BatchSpec, now: float) -> None:
        self.spec = spec
        self.state = BatchState.RUNNING
        self._began = self._ended = now
        self._groups: list[_Group] = []
        self._in_flight: dict[int, _Group] = {}
        self._accepted = 0

    def begin(self) -> Moves:
        return Moves(submit=self._start_groups())

    def finished(self, result: RolloutResult, now: float) -> Moves:
        """A sample of this batch ended; its ``group_id`` and ``sample`` say which. Saying it twice changes nothing."""
        group = self._in_flight.get(self._row_of(result.group_id))
        if group is None or result.sample in group.rollouts:
            return Moves()
        group.rollouts[result.sample] = result
        if len(group.rollouts) < self.spec.group_size:
            return Moves()
        del self._in_flight[group.row_index]
        group.outcome = self._judge(group)
        self._accepted += group.outcome is GroupOutcome.ACCEPTED
        moves = Moves()
        if self.state is BatchState.RUNNING:
            moves = self._refill_or_finish()
        if self.finished_all:
            self._ended = now
        return moves

    def cancel(self, now: float) -> Moves:
        """End the batch; what it has stays in the result. A batch that is over stays as it is."""
        if self.state is not BatchState.RUNNING:
            return Moves()
        self.state, self._ended = BatchState.CANCELLED, now
        return Moves(cancel=self._unfinished())

    @property
    def finished_all(self) -> bool:
        """The batch is over and so is every rollout that it started."""
        return self.state is not BatchState.RUNNING and not self._in_flight

    def progress(self) -> BatchProgress:
        outcomes = [group.outcome for group in self._groups]
        results = [result for group in self._groups for result in group.rollouts.values()]
        return BatchProgress(
            batch_id=self.spec.batch_id,
            state=self.state if self.finished_all else BatchState.RUNNING,
            groups_wanted=self.spec.groups_wanted,
            accepted=self._accepted,
            uniform=outcomes.count(GroupOutcome.UNIFORM),
            broken=outcomes.count(GroupOutcome.BROKEN),
            in_flight=len(self._in_flight),
            rollouts_done=sum(result.status is Status.DONE for result in results),
            rollouts_failed=sum(result.status in (Status.FAILED, Status.TIMED_OUT) for result in results),
            rows_used=len(self._groups),
        )

    def result(self) -> BatchResult:
        """Every group that was started, by row."""
        groups = [
            GroupResult(
                group_id=self._group_id(group.row_index),
                row_index=group.row_index,
                outcome=group.outcome or GroupOutcome.CANCELLED,
                rollouts=[group.rollouts[sample] for sample in sorted(group.rollouts)],
            )
            for group in self._groups
        ]
        return BatchResult(self.progress(), groups, self._ended - self._began)

    def _judge(self, group: _Group) -> GroupOutcome:
        results = group.rollouts.values()
        rewards = [r.reward for r in results if r.status is Status.DONE and r.reward is not None]
        if self.state is not BatchState.RUNNING:
            return GroupOutcome.CANCELLED
        # Samples that broke are no statement about the prompt: they are left out, and too few left is no group.
        if len(rewards) < min(self.spec.min_usable_samples, self.spec.group_size):
            return GroupOutcome.BROKEN
        if self.spec.filter is GroupFilter.INFORMATIVE and max(rewards) - min(rewards) <= _SAME_REWARD:
            return GroupOutcome.UNIFORM
        return GroupOutcome.ACCEPTED

    def _refill_or_finish(self) -> Moves:
        if self._accepted >= self.spec.groups_wanted:
            self.state = BatchState.DONE
            return Moves(cancel=self._unfinished())
        submit = self._start_groups()
        if not self._in_flight:
            self.state = BatchState.EXHAUSTED
        return Moves(submit=submit)

    def _start_groups(self) -> tuple[RolloutSpec, ...]:
        """As many groups as are still wanted, and those that ``max_parallel_groups`` allows beyond ``groups_wanted``
        as spares, so that a batch need not wait for its slowest group."""
        wanted = self.spec.groups_wanted
        limit = self.spec.max_parallel_groups or wanted
        target = min(limit, wanted - self._accepted + max(0, limit - wanted))
        started: list[RolloutSpec] = []
        while len(self._in_flight) < target and len(self._groups) < len(self.spec.rows):
            group = _Group(len(self._groups))
            self._groups.append(group)
            self._in_flight[group.row_index] = group
            started += [self._sample(group.row_index, sample) for sample in range(self.spec.group_size)]
        return tuple(started)

    def _sample(self, row_index: int, sample: int) -> RolloutSpec:
        spec = self.spec
        return RolloutSpec(
            rollout_id=self._rollout_id(row_index, sample),
            task=spec.task,
            row=spec.rows[row_index],
            group_id=self._group_id(row_index),
            sample=sample,
            sampling=spec.sampling,
            budgets=spec.budgets,
            priority=spec.priority,
            policy=spec.policy,
        )

    def _unfinished(self) -> tuple[str, ...]:
        return tuple(
            self._rollout_id(group.row_index, sample)
            for group in self._in_flight.values()
            for sample in range(self.spec.group_size)
            if sample not in group.rollouts
        )

    def _group_id(self, row_index: int) -> str:
        return f"{self.spec.batch_id}.g{row_index}"

    def _rollout_id(self, row_index: int, sample: int) -> str:
        return f"{self._group_id(row_index)}.s{sample}"

    def _row_of(self, group_id: str) -> int:
        return int(group_id.removeprefix(f"{self.spec.batch_id}.g"))
