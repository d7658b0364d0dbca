"""The stage scheduler: a state machine over rollouts, workers and LLM servers, without I/O and without a clock.

``handle(event, now)`` returns what is to be done; ``now`` is any clock that does not go back, in seconds.

Invariants, kept by tests/core/test_core_scheduler_machine.py under any order of events:
every accepted rollout gets exactly one Ended; no pool of a worker exceeds its size; every attempt that was
started on a worker is reported over by it, discarded there, or lost with it; a server's assignments are
exactly the attempts in RUN on it; while workers and servers are there, what waits gets its turn.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

from prorl_hpc.core.balancer import ServerBalancer
from prorl_hpc.core.events import (
    Cancel,
    Command,
    Ended,
    Event,
    Order,
    ServerLost,
    ServerSeen,
    Submit,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.group_ages import GroupAges
from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.core.life import Life, Rank
from prorl_hpc.core.workplace import Slot, Workplace
from prorl_hpc.messages.control import Discard, Discarded, StageFinished, StartEval, StartInit, StartRun
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage, Status

_STAGES = {Status.INIT: Stage.INIT, Status.RUN: Stage.RUN, Status.EVAL: Stage.EVAL}


class Scheduler:
    """See the module. Not thread-safe; one ``handle`` at a time."""

    def __init__(self, *, retries: int = 2, report_grace_s: float = 15.0, discard_again_s: float = 10.0) -> None:
        """``retries``: attempts beyond the first. ``report_grace_s``: how long after a stage's budget a worker that
        has not reported it is no longer waited for. ``discard_again_s``: when an unanswered Discard is repeated."""
        self._retries = retries
        self._report_grace_s = report_grace_s
        self._discard_again_s = discard_again_s
        self.workers: dict[str, Workplace] = {}
        self.servers = ServerBalancer()
        self.counts: Counter[Status] = Counter()
        """Rollouts by status now; finished ones since the start."""
        self._lives: dict[str, Life] = {}
        self._attempts: dict[str, Life] = {}
        self._ages = GroupAges()
        self._numbers = itertools.count()
        self._queue: list[tuple[Rank, str, int]] = []
        self._walls: list[tuple[float, str]] = []
        self._overdue: list[tuple[float, str, Stage]] = []
        self._rooms: LeastLoaded[tuple[float, float]] = LeastLoaded()
        self._touched: dict[str, None] = {}
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case StageFinished():
                self._stage_finished(event, now)
            case Discarded():
                self._gone(event.worker_id, event.rollout_id)
            case Submit():
                for spec in event.specs:
                    self._submit(spec, now)
            case Cancel():
                for rollout_id in event.rollout_ids:
                    self._cancel(rollout_id, now)
            case WorkerJoined():
                self._worker_joined(event, now)
            case WorkerLost():
                self._worker_lost(event, now)
            case ServerSeen():
                self.servers.seen(event.ref, event.weight_version, event.healthy)
                self._touched.update(dict.fromkeys(self.workers))
            case ServerLost():
                self._server_lost(event, now)
            case Tick():
                self._tick(now)
        self._start_what_fits(now)
        commands, self._commands = self._commands, []
        return commands

    def life(self, rollout_id: str) -> Life | None:
        """A rollout that has not ended, to look at."""
        return self._lives.get(rollout_id)

    @property
    def live(self) -> int:
        """Rollouts that have not ended."""
        return len(self._lives)

    # rollouts

    def _submit(self, spec: RolloutSpec, now: float) -> None:
        if spec.rollout_id in self._lives:
            raise ValueError(f"rollout {spec.rollout_id} is already under way")
        number = next(self._numbers)
        rank = (spec.priority, self._ages.join(spec.group_id, number), number)
        life = Life(spec, rank, now + spec.budgets.wall_s, now)
        self._lives[spec.rollout_id] = life
        self.counts[Status.QUEUED] += 1
        heapq.heappush(self._walls, (life.wall_end, spec.rollout_id))
        self._enqueue(life)

    def _cancel(self, rollout_id: str, now: float) -> None:
        life = self._lives.get(rollout_id)
        if life is not None:
            self._discard(life, now)
            self._end(life, Status.CANCELLED)

    def _stage_finished(self, event: StageFinished, now: float) -> None:
        life = self._attempts.get(event.rollout_id)
        workplace = self.workers.get(event.worker_id)
        if (
            life is None
            or workplace is None
            or life.worker != event.worker_id
            or _STAGES.get(life.status) != event.stage
        ):
            # Of an attempt that was given up, or said twice. A failure and EVAL leave nothing behind on the worker,
            # but a discard that is under way is answered all the same, and frees the slot then.
            return
        life.end_stage(event.stage, event.busy_s, now)
        if event.trajectory is not None:
            life.trajectory = event.trajectory
        if event.stage is Stage.RUN:
            self.servers.release(event.rollout_id)
        self._touched[event.worker_id] = None
        if event.failure is not None:
            self._leave(life)
            self._retry_or_fail(life, event.failure, now, timed_out=event.timed_out)
        elif event.stage is Stage.EVAL:
            self._leave(life)
            self._end(life, Status.DONE, None, event.reward, event.metrics)
        else:
            status = Status.READY if event.stage is Stage.INIT else Status.RAN
            workplace.put(event.rollout_id, Slot(status.value), life.rank)
            self._enter(life, status, now)

    def _retry_or_fail(
        self, life: Life, failure: Failure, now: float, *, timed_out: bool = False, blame: bool = True
    ) -> None:
        """After the attempt left its worker. ``blame``: try elsewhere next time, if there is an elsewhere."""
        if not failure.kind.retryable or life.attempt > self._retries:
            self._end(life, Status.TIMED_OUT if timed_out else Status.FAILED, failure)
            return
        if blame:
            life.avoid_workers.add(life.worker)
            if failure.kind is FailureKind.INFERENCE and life.server:
                life.avoid_servers.add(life.server)
        self.counts[life.status] -= 1
        self.counts[Status.QUEUED] += 1
        life.try_again(now)
        self._enqueue(life)

    def _end(
        self,
        life: Life,
        status: Status,
        failure: Failure | None = None,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
    ) -> None:
        if status is Status.DONE and reward is None:
            status = Status.FAILED
            failure = Failure(Stage.EVAL, FailureKind.TASK, f"EVAL of task {life.spec.task} ended without a reward")
        self._enter(life, status, life.since)
        del self._lives[life.spec.rollout_id]
        self._ages.leave(life.spec.group_id)
        self._commands.append(Ended(life.result(status, failure, reward, metrics or {})))

    def _enter(self, life: Life, status: Status, now: float) -> None:
        self.counts[life.status] -= 1
        self.counts[status] += 1
        life.enter(status, now)

    def _enqueue(self, life: Life) -> None:
        heapq.heappush(self._queue, (life.rank, life.spec.rollout_id, life.attempt))

    # attempts and where they live

    def _leave(self, life: Life) -> None:
        """The attempt is over on its worker, and the worker knows it."""
        self.servers.release(life.attempt_id)
        self._attempts.pop(life.attempt_id, None)
        self._gone(life.worker, life.attempt_id)

    def _discard(self, life: Life, now: float) -> None:
        """The attempt is over here; its worker, if it has one, is told so."""
        self.servers.release(life.attempt_id)
        if self._attempts.pop(life.attempt_id, None) is not None:
            self._order_discard(life.worker, life.attempt_id, now)

    def _order_discard(self, worker_id: str, attempt_id: str, now: float) -> None:
        workplace = self.workers[worker_id]
        if attempt_id not in workplace:
            workplace.put(attempt_id, Slot.FOREIGN)
        workplace.leaving[attempt_id] = now
        self._commands.append(Order(worker_id, Discard(attempt_id)))

    def _gone(self, worker_id: str, attempt_id: str) -> None:
        workplace = self.workers.get(worker_id)
        # A live attempt stays: its name cannot be that of a discarded one.
        if workplace is not None and attempt_id not in self._attempts:
            workplace.remove(attempt_id)
            self._touched[worker_id] = None

    def _worker_joined(self, event: WorkerJoined, now: float) -> None:
        workplace = self.workers.get(event.worker_id)
        if workplace is None:
            workplace = self.workers[event.worker_id] = Workplace(event.worker_id, event.pools)
        workplace.pools = event.pools
        self._touched[event.worker_id] = None
        for attempt_id in sorted(set(workplace) - event.held):
            life = self._attempts.get(attempt_id)
            if life is None:
                # Being discarded: the worker's answer, not its silence, says that it is gone.
                self._order_discard(event.worker_id, attempt_id, now)
                continue
            message = f"worker {event.worker_id} no longer holds it: was it started anew?"
            failure = Failure(_STAGES.get(life.status), FailureKind.INFRASTRUCTURE, message)
            # Discarded nevertheless: the order to start it may have crossed with the Hello.
            self._discard(life, now)
            self._retry_or_fail(life, failure, now)
        for attempt_id in sorted(event.held):
            if attempt_id not in self._attempts or self._attempts[attempt_id].worker != event.worker_id:
                self._order_discard(event.worker_id, attempt_id, now)

    def _worker_lost(self, event: WorkerLost, now: float) -> None:
        workplace = self.workers.pop(event.worker_id, None)
        if workplace is None:
            return
        self._rooms.discard(event.worker_id)
        for attempt_id in workplace:
            life = self._attempts.pop(attempt_id, None)
            if life is not None:
                self.servers.release(attempt_id)
                message = f"worker {event.worker_id} was lost: {event.reason}"
                failure = Failure(_STAGES.get(life.status), FailureKind.INFRASTRUCTURE, message)
                self._retry_or_fail(life, failure, now)

    def _server_lost(self, event: ServerLost, now: float) -> None:
        for attempt_id in self.servers.lost(event.server_id):
            life = self._attempts[attempt_id]
            message = f"LLM server {event.server_id} was lost: {event.reason}"
            self._discard(life, now)
            self._retry_or_fail(life, Failure(Stage.RUN, FailureKind.INFERENCE, message), now, blame=False)

    # time

    def _tick(self, now: float) -> None:
        while self._walls and self._walls[0][0] <= now:
            wall_end, rollout_id = heapq.heappop(self._walls)
            life = self._lives.get(rollout_id)
            if life is not None and life.wall_end == wall_end:
                message = (
                    f"it took more than budgets.wall_s={life.spec.budgets.wall_s:g} s, queues counted ({life.status})"
                )
                self._discard(life, now)
                self._end(life, Status.TIMED_OUT, Failure(_STAGES.get(life.status), FailureKind.TASK, message))
        while self._overdue and self._overdue[0][0] <= now:
            _, attempt_id, stage = heapq.heappop(self._overdue)
            life = self._attempts.get(attempt_id)
            if life is not None and _STAGES.get(life.status) is stage:
                message = f"worker {life.worker} did not report the end of {stage} when its budget was over"
                self._discard(life, now)
                self._retry_or_fail(life, Failure(stage, FailureKind.INFRASTRUCTURE, message), now)
        for workplace in self.workers.values():
            for attempt_id, told in tuple(workplace.leaving.items()):
                if now - told >= self._discard_again_s:
                    self._order_discard(workplace.worker_id, attempt_id, now)

    # starting stages

    def _start_what_fits(self, now: float) -> None:
        """Later stages first: they free what earlier ones wait for."""
        touched, self._touched = self._touched, {}
        for worker_id in touched:
            workplace = self.workers.get(worker_id)
            if workplace is not None:
                self._start_evals(workplace, now)
                self._start_runs(workplace, now)
                self._rank(workplace)
        self._start_inits(now)

    def _start_evals(self, workplace: Workplace, now: float) -> None:
        while workplace.room_for_eval and (attempt_id := workplace.next_waiting(Slot.RAN)) is not None:
            life = self._attempts[attempt_id]
            if (budget_s := self._begin(life, Stage.EVAL, now)) is not None:
                workplace.put(attempt_id, Slot.EVAL)
                self._commands.append(Order(workplace.worker_id, StartEval(attempt_id, budget_s)))

    def _start_runs(self, workplace: Workplace, now: float) -> None:
        serverless: list[Life] = []
        while workplace.room_for_run and (attempt_id := workplace.next_waiting(Slot.READY)) is not None:
            life = self._attempts[attempt_id]
            server = self.servers.assign(attempt_id, life.spec.policy, life.avoid_servers)
            if server is None:
                serverless.append(life)
            elif (budget_s := self._begin(life, Stage.RUN, now)) is not None:
                life.server = server.server_id
                workplace.put(attempt_id, Slot.RUN)
                self._commands.append(Order(workplace.worker_id, StartRun(attempt_id, server, budget_s)))
        for life in serverless:
            workplace.put(life.attempt_id, Slot.READY, life.rank)

    def _start_inits(self, now: float) -> None:
        put_off: list[Life] = []
        while self._queue and len(self._rooms):
            _, rollout_id, attempt = heapq.heappop(self._queue)
            life = self._lives.get(rollout_id)
            if life is None or life.status is not Status.QUEUED or life.attempt != attempt:
                continue
            elsewhere = not life.avoid_workers.issuperset(self.workers)
            worker_id = self._rooms.least(life.avoid_workers if elsewhere else ())
            if worker_id is None:
                put_off.append(life)
                continue
            workplace = self.workers[worker_id]
            life.worker = worker_id
            if (budget_s := self._begin(life, Stage.INIT, now)) is not None:
                self._attempts[life.attempt_id] = life
                workplace.put(life.attempt_id, Slot.INIT)
                self._commands.append(Order(worker_id, StartInit(life.attempt_spec, budget_s)))
                self._rank(workplace)
        for life in put_off:
            self._enqueue(life)

    def _begin(self, life: Life, stage: Stage, now: float) -> float | None:
        """The stage's budget in seconds, its clock started; None if nothing of the total is left, and it ended."""
        budget_s = life.budget_s(stage)
        if budget_s <= 0:
            message = f"budgets.total_s={life.spec.budgets.total_s:g} s was used up before {stage}"
            self._discard(life, now)
            self._end(life, Status.TIMED_OUT, Failure(stage, FailureKind.TASK, message))
            return None
        self.counts[life.status] -= 1
        life.begin(stage, now)
        self.counts[life.status] += 1
        heapq.heappush(self._overdue, (now + budget_s + self._report_grace_s, life.attempt_id, stage))
        return budget_s

    def _rank(self, workplace: Workplace) -> None:
        if workplace.room_for_init:
            self._rooms.set(workplace.worker_id, workplace.load)
        else:
            self._rooms.discard(workplace.worker_id)
