"""A run over many attempts, in virtual time: orders, scheduler and trainer as they are; journal and agents as lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from prorl_hpc.core.events import (
    Drain,
    Ended,
    Event,
    Order,
    Recover,
    Retried,
    ServerSeen,
    Tick,
    Unfinished,
    Wake,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.groups import CarriedGroup, Moves
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.batch import BatchResult, BatchSpec, GroupFilter, WhenFull
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Pools,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Budgets, RolloutResult, Stage
from prorl_hpc.rollout.journal_records import OpenBatch
from prorl_hpc.rollout.order_desk import events_of
from prorl_hpc.rollout.orders import Orders, Over

SERVER = ServerRef("s", "n", "ipc://x", "")
_STAGES = {StartRun: Stage.RUN, StartEval: Stage.EVAL}


@dataclass
class Record:
    spec: BatchSpec
    carried: tuple[CarriedGroup, ...] = ()
    before: tuple[RolloutResult, ...] = ()
    log: list[RolloutResult | None] = field(default_factory=list)
    state: str = "running"
    asleep: bool = False


@dataclass
class Disk:
    """What outlives an attempt: the journal, and the trainer's checkpoint."""

    batches: dict[str, Record] = field(default_factory=dict)
    closed: dict[str, BatchResult] = field(default_factory=dict)
    attempts: dict[str, tuple[int, int]] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    checkpoint: tuple[int, int] = (0, 0)
    trained: dict[int, BatchResult] = field(default_factory=dict)
    """By step: what it was trained on, whenever it was."""
    asked: dict[str, BatchSpec] = field(default_factory=dict)
    published: bool = False

    def found(self) -> list[OpenBatch]:
        return [
            OpenBatch(
                r.spec, r.carried, r.before, tuple(r.log),
                {n: a for n, (a, _) in self.attempts.items()}, r.state,
                {n: s for n, (_, s) in self.attempts.items() if s}, r.asleep,
            )
            for r in self.batches.values()
        ]  # fmt: skip


class Attempt:
    """One attempt of the run. ``step_of_run``: (weights, batch) of every RUN that was started."""

    def __init__(self, disk: Disk, random: Random, steps: int, carry: bool) -> None:
        self.disk, self.random, self.steps, self.carry = disk, random, steps, carry
        self.scheduler = Scheduler(retries=0)
        self.orders = Orders(Budgets())
        self.now = 0.0
        self.working: dict[tuple[str, str], Stage] = {}
        self.names: list[str] = []
        self.runs: list[tuple[int, str]] = []
        self.step, self.cursor = disk.checkpoint
        self.version = 0
        if disk.published:
            self.scheduler.servers.require("policy", 1)
        self._resume()
        for worker in ("v", "w"):
            self.tell(WorkerJoined(worker, Pools(2, 3, 2, 2)))
        self.tell(ServerSeen(SERVER, 0, True))

    def _resume(self) -> None:
        disk = self.disk
        sleeping = {"policy"} if disk.published else set()
        resumed = self.orders.resume(disk.found(), 0.0, cut_off=True, sleeping=sleeping)
        disk.attempts = {one.spec.rollout_id: (one.attempt, one.spared) for one in resumed.under_way}
        for batch_id in resumed.asleep:
            disk.batches[batch_id].asleep = True
        self.tell(Recover(resumed.under_way, 0.0), *events_of(resumed.moves))
        for over in resumed.over:
            self._finish(over)

    # the trainer

    def publish(self) -> None:
        self.version = self.step + 1
        self.disk.published = True
        self.tell(ServerSeen(SERVER, self.version, True))

    def order(self) -> BatchSpec:
        """A function of the position alone."""
        rows = [{"id": f"r{n}"} for n in range(self.cursor, self.cursor + 5)]
        when_full = WhenFull.CARRY if self.carry else WhenFull.CANCEL
        return BatchSpec(
            f"step-{self.step + 1}", "t", rows, 2, 2, filter=GroupFilter.INFORMATIVE, max_parallel_groups=3,
            when_full=when_full, client="trainer",
        )  # fmt: skip

    def ask(self) -> None:
        spec = self.order()
        assert self.disk.asked.setdefault(spec.batch_id, spec) == spec, "another order under the same id"
        if spec.batch_id in self.disk.closed:
            return
        if spec.batch_id not in self.disk.batches:
            closes, carried, before = self.orders.take_over(spec)
            self.disk.batches.pop(closes, None)
            self.disk.batches[spec.batch_id] = Record(spec, tuple(carried), tuple(before))
            moves, over = self.orders.begin_batch(spec, self.now, carried, before)
            self._make(moves)
            if over is not None:
                self._finish(over)
        if spec.batch_id in self.disk.batches:
            self.disk.batches[spec.batch_id].asleep = False
        self.tell(Wake(self.orders.wake(spec.batch_id)))

    def train(self) -> bool:
        """One step, if its batch is there."""
        result = self.disk.closed.get(f"step-{self.step + 1}")
        if result is None:
            return False
        self.step, self.cursor = self.step + 1, self.cursor + result.progress.rows_used
        assert self.disk.trained.setdefault(self.step, result) is result, "trained on something else this time"
        return True

    @property
    def done(self) -> bool:
        return self.step == self.steps

    # one thing happens

    def act(self) -> None:
        if self.working and self.random.random() < 0.7:
            self.work()
        elif self.version != self.step + 1:
            self.publish()
            self.ask()
        elif self.train():
            if self.random.random() < 0.5:
                self.disk.checkpoint = (self.step, self.cursor)
        else:
            self.work()

    def work(self) -> None:
        """A stage ends somewhere."""
        self.now += 1.0
        if not self.working:
            self.tell(Tick())
            return
        (worker, attempt), stage = self.random.choice(sorted(self.working.items()))
        del self.working[worker, attempt]
        reward = float(self.random.random() < 0.5) if stage is Stage.EVAL else None
        self.tell(StageFinished(worker, attempt, stage, reward=reward))

    def drain(self) -> None:
        self.tell(Drain())

    def workers_leave(self) -> None:
        for worker in ("v", "w"):
            self.working = {key: stage for key, stage in self.working.items() if key[0] != worker}
            self.tell(WorkerLost(worker, "it left", left=True))

    # the rest of the coordinator

    def tell(self, *events: Event) -> None:
        waiting = list(events)
        while waiting:
            for command in self.scheduler.handle(waiting.pop(0), self.now):
                if isinstance(command, Ended):
                    waiting += self._ended(command.result)
                elif isinstance(command, Retried):
                    self.disk.attempts[command.rollout_id] = (command.attempt, command.spared)
                else:
                    waiting += self._obey(command)

    def _obey(self, order: Order) -> list[Event]:
        message = order.message
        if isinstance(message, StartInit):
            self.names.append(message.spec.rollout_id)
            self.working[order.worker_id, message.spec.rollout_id] = Stage.INIT
        elif isinstance(message, StartRun | StartEval):
            self.working[order.worker_id, message.rollout_id] = _STAGES[type(message)]
            if isinstance(message, StartRun):
                self.runs.append((self.version, message.rollout_id.partition(".")[0]))
        elif isinstance(message, Discard):
            self.working.pop((order.worker_id, message.rollout_id), None)
            return [Discarded(order.worker_id, message.rollout_id)]
        return []

    def _ended(self, result: RolloutResult) -> list[Event]:
        self.disk.results[result.rollout_id] += 1
        self.disk.attempts.pop(result.rollout_id, None)
        assert result.attempts == 1, "being cut off used up a retry"
        assert result.failure is None
        batch_id, moves, over = self.orders.ended(result, self.now)
        self.disk.batches[batch_id].log.append(result)
        if over is not None:
            self._finish(over)
        return events_of(moves)

    def _make(self, moves: Moves) -> None:
        self.tell(*events_of(moves))

    def _finish(self, over: Over) -> None:
        batch_id = over.result.progress.batch_id
        assert batch_id not in self.disk.closed, "a batch ended twice"
        self.disk.closed[batch_id] = over.result
        if over.carries_on:
            self.disk.batches[batch_id].state = "full"
        else:
            del self.disk.batches[batch_id]


def unfinished(disk: Disk) -> list[Unfinished]:
    """What another attempt would have to do."""
    return list(Orders(Budgets()).resume(disk.found(), 0.0).under_way)
