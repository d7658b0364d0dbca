"""Where a simulation's rollouts come from: one stream that never runs dry, arrivals in time, or batch after batch.

A supply is told each result and names the rollouts to submit and to cancel; the engine asks for their fates in the
order in which they are named, so that a rollout's fate hangs on its place alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import Draws, Fate
from prorl_hpc.core.groups import BatchSampler, CarriedGroup, Moves
from prorl_hpc.messages.batch import BatchSpec, BatchState, GroupFilter, Refill, WhenFull
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec

TASK = "simulated"
_ROW = {"id": "0"}
_NOTHING = Moves()


class Supply(Protocol):
    """``complete``: nothing will be submitted any more. ``low_mark``: with fewer in the queue ``more`` is to be called.
    ``wake_s``: when ``woken`` is to be called, and again after it was; inf for never. ``batch_s``: seconds from the
    order of each batch to its end."""

    complete: bool
    low_mark: int
    wake_s: float
    batch_s: list[float]

    def fate(self, spec: RolloutSpec) -> Fate:
        """Called once for each rollout, in the order of their submission."""

    def more(self) -> Moves: ...

    def woken(self, now: float) -> Moves: ...

    def ended(self, result: RolloutResult, now: float) -> Moves | None: ...

    def reward(self, rollout_id: str) -> float: ...


def supply_of(config: SimulationConfig, draws: Draws) -> Supply:
    return Batches(config, draws) if config.groups_per_batch else Stream(config, draws)


class Stream:
    """``rollouts`` of them, one after the other: as many as the queue takes, or as they arrive."""

    def __init__(self, config: SimulationConfig, draws: Draws) -> None:
        pools = config.pools
        self.complete = False
        self.batch_s: list[float] = []
        self._left = config.rollouts
        self._fates = draws.fates(0)
        self._budgets = config.budgets
        self._group_size = config.group_size
        self._number = 0
        self._group_id = ""
        self._arrivals: Iterator[float] | None = draws.arrivals() if config.arrivals else None
        self.wake_s = next(self._arrivals) if self._arrivals else math.inf
        self._at_once = config.nodes * (pools.run if pools.coupled else pools.init)
        self.low_mark = 0 if config.arrivals else self._at_once

    def fate(self, spec: RolloutSpec) -> Fate:
        return next(self._fates)

    def more(self) -> Moves:
        return Moves(submit=self._next(min(self._left, self._at_once)))

    def woken(self, now: float) -> Moves:
        assert self._arrivals is not None
        arrived = self._next(1)
        self.wake_s = now + next(self._arrivals) if self._left else math.inf
        return Moves(submit=arrived)

    def ended(self, result: RolloutResult, now: float) -> None:
        return None

    def reward(self, rollout_id: str) -> float:
        return 1.0

    def _next(self, n: int) -> tuple[RolloutSpec, ...]:
        first, self._number = self._number, self._number + n
        self._left -= n
        if not self._left:
            self.complete, self.low_mark = True, 0
        size, budgets = self._group_size, self._budgets
        specs, group_id = [], self._group_id
        for i in range(first, first + n):
            sample = i % size
            if not sample and size > 1:
                group_id = f"g{i // size}"
            specs.append(RolloutSpec(f"r{i}", TASK, _ROW, group_id, sample, budgets=budgets))
        self._group_id = group_id
        return tuple(specs)


class Batches:
    """Batch after batch, each ordered ``train_s`` after the one before was full, as a trainer does."""

    def __init__(self, config: SimulationConfig, draws: Draws) -> None:
        self.complete = False
        self.low_mark = 0
        self.batch_s: list[float] = []
        self.wake_s = 0.0
        self._config = config
        self._draws = draws
        self._wanted = math.ceil(config.rollouts / (config.group_size * config.groups_per_batch))
        self._ordered = 0
        self._began = 0.0
        self._samplers: deque[BatchSampler] = deque()
        """The running batch is the last; those before it are full, and wait for what they cancelled."""
        self._fates: dict[str, Iterator[Fate]] = {}
        self._uniform: dict[str, tuple[Iterator[bool], list[bool]]] = {}

    def fate(self, spec: RolloutSpec) -> Fate:
        return next(self._fates[spec.rollout_id.partition(".")[0]])

    def more(self) -> Moves:
        return _NOTHING

    def woken(self, now: float) -> Moves:
        """Order the next batch."""
        self.wake_s = math.inf
        number, self._ordered, self._began = self._ordered, self._ordered + 1, now
        groups: list[CarriedGroup] = []
        before: list[RolloutResult] = []
        if self._samplers:
            groups, before = self._samplers[-1].hand_over()
        while self._samplers and self._samplers[0].finished_all:
            self._samplers.popleft()
        batch_id = f"b{number}"
        # Groups can be carried more than once, but not often: what is older than all that lives is forgotten.
        living = {group.carried_from for group in groups} | {sampler.spec.batch_id for sampler in self._samplers}
        self._fates = {batch_id: self._draws.fates(number)}
        self._uniform = {name: drawn for name, drawn in self._uniform.items() if name in living}
        self._uniform[batch_id] = (self._draws.uniform_groups(number), [])
        sampler = BatchSampler(self._spec(batch_id), now, groups, before)
        self._samplers.append(sampler)
        return self._checked(sampler, sampler.begin(now), now)

    def ended(self, result: RolloutResult, now: float) -> Moves:
        running = self._samplers[-1]
        was_running = running.state is BatchState.RUNNING
        for sampler in self._samplers:
            moves = sampler.finished(result, now)
            if sampler is running and was_running:
                return self._checked(running, moves, now)
        return _NOTHING

    def reward(self, rollout_id: str) -> float:
        """1, or 0 and 1 in turns where the group is informative."""
        batch_id, group, sample = rollout_id.split(".")
        drawn, known = self._uniform[batch_id]
        row = int(group[1:])
        while len(known) <= row:
            known.append(next(drawn))
        return 1.0 if known[row] else float(int(sample[1:]) % 2)

    def _checked(self, running: BatchSampler, moves: Moves, now: float) -> Moves:
        """Note the end of the running batch, if this was it."""
        if running.state is BatchState.RUNNING:
            return moves
        self.batch_s.append(now - self._began)
        if self._ordered < self._wanted:
            self.wake_s = now + self._config.train_s
            return moves
        self.complete = True
        groups, results = running.hand_over()
        finished = {result.rollout_id for result in results}
        carried = [spec.rollout_id for group in groups for spec in group.specs if spec.rollout_id not in finished]
        return Moves(moves.submit, (*moves.cancel, *carried))

    def _spec(self, batch_id: str) -> BatchSpec:
        config = self._config
        rows = math.ceil(4 * config.groups_per_batch / (1 - config.uniform_share)) + config.max_parallel_groups + 1000
        return BatchSpec(
            batch_id=batch_id,
            task=TASK,
            rows=[_ROW] * rows,
            groups_wanted=config.groups_per_batch,
            group_size=config.group_size,
            filter=GroupFilter.INFORMATIVE if config.group_size > 1 else GroupFilter.ALL,
            budgets=config.budgets,
            when_full=WhenFull(config.when_full),
            refill=Refill(config.refill),
            max_parallel_groups=config.max_parallel_groups,
        )
