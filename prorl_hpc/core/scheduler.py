"""The stage scheduler: a state machine over rollouts, workers and LLM servers, without I/O and without a clock.

``handle(event, now)`` returns what is to be done; ``now`` is any clock that does not go back, in seconds.

Invariants, kept by tests/core/test_core_scheduler_machine.py under any order of events:
every accepted rollout gets exactly one Ended; no pool of a worker exceeds its size; every attempt that was
started on a worker is reported over by it, discarded there, or lost with it; a server's assignments are
exactly the attempts in RUN on it; while workers and servers are there, what waits gets its turn.
"""

from __future__ import annotations

from collections import Counter

from prorl_hpc.core.balancer import ServerBalancer
from prorl_hpc.core.deadlines import Deadlines
from prorl_hpc.core.events import (
    Cancel,
    Command,
    Ended,
    Event,
    Order,
    Pause,
    Recover,
    Retried,
    ServerDrains,
    ServerLost,
    ServerSeen,
    Submit,
    Tick,
    WorkerDrains,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.core.life import Life, split_attempt_id
from prorl_hpc.core.waiting_line import WaitingLine
from prorl_hpc.core.workplace import Slot, Workplace
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    MoveRun,
    ServerTrouble,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage, Status

_STAGES = {Status.INIT: Stage.INIT, Status.RUN: Stage.RUN, Status.EVAL: Stage.EVAL}
_SLOTS = {Stage.INIT: Slot.INIT, Stage.RUN: Slot.RUN, Stage.EVAL: Slot.EVAL}


class Scheduler:
    """See the module. Not thread-safe; one ``handle`` at a time."""

    def __init__(
        self,
        *,
        retries: int = 2,
        report_grace_s: float = 15.0,
        discard_again_s: float = 10.0,
        balancing: str = "least_in_flight",
        move_runs: bool = True,
    ) -> None:
        """``retries``: attempts beyond the first. ``report_grace_s``: how long after a stage's budget a worker that
        has not reported it is no longer waited for. ``discard_again_s``: when an unanswered Discard is repeated.
        ``balancing`` as in ServerBalancer. ``move_runs``: a lost server's RUNs go on elsewhere, if they can."""
        self._retries = retries
        self._report_grace_s = report_grace_s
        self._discard_again_s = discard_again_s
        self._move_runs = move_runs
        self.workers: dict[str, Workplace] = {}
        self.servers = ServerBalancer(balancing)
        self.paused = False
        self.counts: Counter[Status] = Counter()
        """Rollouts by status now; finished ones since the start."""
        self._lives: dict[str, Life] = {}
        self._attempts: dict[str, Life] = {}
        """Attempts that are on a worker and wanted."""
        self._ending: dict[str, Life] = {}
        """Attempts being discarded whose trajectory is waited for."""
        self._orphans: set[str] = set()
        self._orphans_until = 0.0
        self._line = WaitingLine()
        self._walls: Deadlines[str] = Deadlines()
        self._overdue: Deadlines[tuple[str, str]] = Deadlines()
        self._discards: Deadlines[tuple[str, str]] = Deadlines()
        self._rooms: LeastLoaded[tuple[float, float]] = LeastLoaded()
        self._touched: dict[str, None] = {}
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case StageFinished():
                self._stage_finished(event, now)
            case Submit():
                for spec in event.specs:
                    self._line.push(self._begin_life(spec, now))
            case Discarded():
                self._discarded(event)
            case Tick():
                self._tick(now)
            case Cancel():
                for rollout_id in event.rollout_ids:
                    self._cancel(rollout_id, now)
            case ServerTrouble():
                self._server_trouble(event)
            case _:
                self._membership(event, now)
        self._start_what_fits(now)
        commands, self._commands = self._commands, []
        return commands

    def _membership(self, event: Event, now: float) -> None:
        match event:
            case WorkerJoined():
                self._worker_joined(event, now)
            case WorkerLost():
                self._worker_lost(event, now)
            case WorkerDrains():
                if event.worker_id in self.workers:
                    self.workers[event.worker_id].draining = event.on
                    self._touched[event.worker_id] = None
            case ServerSeen():
                if self.servers.seen(event.ref, event.weight_version, event.healthy):
                    self._touch_all()
            case ServerLost():
                self._server_lost(event, now)
            case ServerDrains():
                self.servers.drain(event.server_id, event.on)
                self._touch_all()
            case Pause():
                self.paused = event.on
            case Recover():
                self._recover(event, now)

    def life(self, rollout_id: str) -> Life | None:
        """A rollout that has not ended, to look at."""
        return self._lives.get(rollout_id)

    @property
    def lives(self) -> list[Life]:
        """All that have not ended, in the order of their acceptance."""
        return list(self._lives.values())

    @property
    def live(self) -> int:
        """Rollouts that have not ended."""
        return len(self._lives)

    # rollouts

    def _begin_life(self, spec: RolloutSpec, now: float) -> Life:
        if spec.rollout_id in self._lives:
            raise ValueError(f"rollout {spec.rollout_id} is already under way")
        life = Life(spec, self._line.rank(spec), 0.0, now)
        life.wall_end = now + life.budgets.wall_s
        self._lives[spec.rollout_id] = life
        self.counts[Status.QUEUED] += 1
        self._walls.add(life.wall_end, spec.rollout_id)
        return life

    def _recover(self, event: Recover, now: float) -> None:
        for spec, attempt in event.rollouts:
            self._begin_life(spec, now).attempt = attempt
            self._orphans.add(spec.rollout_id)
        self._orphans_until = now + event.grace_s

    def _cancel(self, rollout_id: str, now: float) -> None:
        life = self._lives.get(rollout_id)
        if life is not None:
            self._discard(life, now)
            self._end(life, Status.CANCELLED)

    def _stage_finished(self, event: StageFinished, now: float) -> None:
        life = self._attempts.get(event.rollout_id)
        if life is None or life.worker != event.worker_id or _STAGES.get(life.status) != event.stage:
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
            ready = event.stage is Stage.INIT
            self.workers[life.worker].put(event.rollout_id, Slot.READY if ready else Slot.RAN, life.rank)
            self._enter(life, Status.READY if ready else Status.RAN, now)

    def _retry_or_fail(
        self, life: Life, failure: Failure, now: float, *, timed_out: bool = False, blame: bool = True
    ) -> None:
        """After the attempt left its worker. ``blame``: try elsewhere next time, if there is an elsewhere."""
        if not failure.kind.retryable or life.attempt > self._retries:
            self._end(life, Status.TIMED_OUT if timed_out else Status.FAILED, failure)
            return
        if blame:
            life.avoid_workers |= {life.worker}
            if failure.kind is FailureKind.INFERENCE and life.server:
                life.avoid_servers |= {life.server}
        self.counts[life.status] -= 1
        self.counts[Status.QUEUED] += 1
        life.try_again(now)
        self._commands.append(Retried(life.spec.rollout_id, life.attempt))
        self._line.push(life)

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
        self._ending.pop(life.attempt_id, None)
        self._orphans.discard(life.spec.rollout_id)
        self._line.left(life.spec)
        self._commands.append(Ended(life.result(status, failure, reward, metrics or {}), life.trajectory))

    def _enter(self, life: Life, status: Status, now: float) -> None:
        self.counts[life.status] -= 1
        self.counts[status] += 1
        life.enter(status, now)

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
        workplace.leaving.add(attempt_id)
        self._discards.add(now + self._discard_again_s, (worker_id, attempt_id))
        self._commands.append(Order(worker_id, Discard(attempt_id)))

    def _discarded(self, event: Discarded) -> None:
        self._gone(event.worker_id, event.rollout_id)
        life = self._ending.get(event.rollout_id)
        if life is not None and life.worker == event.worker_id:
            self._end_as_ruled(life, event)

    def _end_as_ruled(self, life: Life, last_word: Discarded | None) -> None:
        """An attempt whose trajectory was waited for is gone, with its ``last_word`` or without."""
        assert life.verdict is not None
        if last_word is not None and last_word.trajectory is not None:
            life.trajectory = last_word.trajectory
        self._end(life, *life.verdict)

    def _gone(self, worker_id: str, attempt_id: str) -> None:
        workplace = self.workers.get(worker_id)
        # A live attempt stays: its name cannot be that of a discarded one.
        if workplace is not None and attempt_id not in self._attempts:
            workplace.remove(attempt_id)
            self._touched[worker_id] = None

    # workers

    def _worker_joined(self, event: WorkerJoined, now: float) -> None:
        workplace = self.workers.get(event.worker_id)
        if workplace is None:
            workplace = self.workers[event.worker_id] = Workplace(event.worker_id, event.pools)
        workplace.pools = event.pools
        self._touched[event.worker_id] = None
        for attempt_id in sorted(set(workplace) - {held.rollout_id for held in event.held}):
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
        for held in event.held:
            known = self._attempts.get(held.rollout_id)
            if known is not None and known.worker == event.worker_id:
                self._catch_up(known, held, now)
            elif not self._adopt(workplace, held, now):
                self._order_discard(event.worker_id, held.rollout_id, now)

    def _catch_up(self, life: Life, held: Held, now: float) -> None:
        """The line was cut: reports and orders that were on their way are lost."""
        for report in held.reports:
            if _STAGES.get(life.status) is report.stage:
                self._stage_finished(report, now)
        stage = _STAGES.get(life.status)
        if stage is None or stage is held.running or held.rollout_id not in self._attempts:
            return
        if stage is Stage.INIT:
            message = f"worker {life.worker} holds it without having started it"
            self._discard(life, now)
            self._retry_or_fail(life, Failure(stage, FailureKind.INFRASTRUCTURE, message), now)
            return
        self.servers.release(held.rollout_id)
        ready = stage is Stage.RUN
        self.workers[life.worker].put(held.rollout_id, Slot.READY if ready else Slot.RAN, life.rank)
        self._enter(life, Status.READY if ready else Status.RAN, now)

    def _adopt(self, workplace: Workplace, held: Held, now: float) -> bool:
        """Go on with an attempt that was started before this state was made; False if it is not wanted."""
        rollout_id, attempt = split_attempt_id(held.rollout_id)
        life = self._lives.get(rollout_id)
        if life is None or life.status is not Status.QUEUED or attempt < life.attempt:
            return False
        if held.running is None and not held.reports:
            return False
        self._orphans.discard(rollout_id)
        life.attempt, life.worker = attempt, workplace.worker_id
        self._attempts[held.rollout_id] = life
        for report in held.reports:
            self._go_on(life, report.stage, now - report.busy_s)
            self._stage_finished(report, now)
        if held.running is not None and held.rollout_id in self._attempts:
            self._go_on(life, held.running, now)
            self._overdue.add(now + life.budget_s(held.running) + self._report_grace_s, (held.rollout_id, held.running))
            if held.server is not None:
                life.server = held.server.server_id
                self.servers.adopt(held.rollout_id, held.server)
        return True

    def _go_on(self, life: Life, stage: Stage, since: float) -> None:
        """A stage that is at work, or was until now, without an order."""
        self.workers[life.worker].put(life.attempt_id, _SLOTS[stage])
        self._enter(life, Status(stage.value), since)
        life.queued_s = 0.0

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
            elif (ending := self._ending.get(attempt_id)) is not None and ending.worker == event.worker_id:
                self._end_as_ruled(ending, None)

    # LLM servers

    def _server_lost(self, event: ServerLost, now: float) -> None:
        self._touch_all()
        for attempt_id in self.servers.lost(event.server_id):
            life = self._attempts[attempt_id]
            if self._move_runs and self._move(life, event.server_id):
                continue
            message = f"LLM server {event.server_id} was lost: {event.reason}"
            self._discard(life, now)
            self._retry_or_fail(life, Failure(Stage.RUN, FailureKind.INFERENCE, message), now, blame=False)

    def _server_trouble(self, event: ServerTrouble) -> None:
        life = self._attempts.get(event.rollout_id)
        if life is None or life.worker != event.worker_id or life.status is not Status.RUN:
            return
        # One that was moved meanwhile has been told so: its worker asked before it knew.
        if life.server == event.server_id and not (self._move_runs and self._move(life, event.server_id)):
            self._commands.append(Order(life.worker, MoveRun(event.rollout_id, None)))

    def _move(self, life: Life, away_from: str) -> bool:
        life.avoid_servers |= {away_from}
        server = self.servers.move(life.attempt_id, life.spec.policy, life.avoid_servers)
        if server is None:
            return False
        life.server = server.server_id
        self._commands.append(Order(life.worker, MoveRun(life.attempt_id, server)))
        return True

    def _touch_all(self) -> None:
        self._touched.update(dict.fromkeys(self.workers))

    # time

    def _tick(self, now: float) -> None:
        for wall_end, rollout_id in self._walls.due(now):
            life = self._lives.get(rollout_id)
            if life is not None and life.wall_end == wall_end:
                self._hit_the_wall(life, now)
        for _, (attempt_id, stage) in self._overdue.due(now):
            life = self._attempts.get(attempt_id)
            if life is not None and _STAGES.get(life.status) == stage:
                message = f"worker {life.worker} did not report the end of {stage} when its budget was over"
                self._discard(life, now)
                self._retry_or_fail(life, Failure(Stage(stage), FailureKind.INFRASTRUCTURE, message), now)
        for _, (worker_id, attempt_id) in self._discards.due(now):
            workplace = self.workers.get(worker_id)
            if workplace is not None and attempt_id in workplace.leaving:
                self._order_discard(worker_id, attempt_id, now)
                if (ending := self._ending.get(attempt_id)) is not None:
                    self._end_as_ruled(ending, None)
        if self._orphans and now >= self._orphans_until:
            for rollout_id in sorted(self._orphans):
                self._line.push(self._lives[rollout_id])
            self._orphans.clear()

    def _hit_the_wall(self, life: Life, now: float) -> None:
        message = f"it took more than budgets.wall_s={life.budgets.wall_s:g} s, queues counted ({life.status})"
        failure = Failure(_STAGES.get(life.status), FailureKind.TASK, message)
        if life.status is Status.RUN and life.attempt_id in self._attempts:
            life.verdict = (Status.TIMED_OUT, failure)
            self._ending[life.attempt_id] = life
            self._discard(life, now)
        else:
            self._discard(life, now)
            self._end(life, Status.TIMED_OUT, failure)

    # starting stages

    def _start_what_fits(self, now: float) -> None:
        """Later stages first: they free what earlier ones wait for."""
        if self._touched:
            touched, self._touched = self._touched, {}
            for worker_id in touched:
                workplace = self.workers.get(worker_id)
                if workplace is not None:
                    self._start_evals(workplace, now)
                    self._start_runs(workplace, now)
                    self._rank(workplace)
        if not self.paused:
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
        while len(self._rooms) and (life := self._line.pop(self._admitted)) is not None:
            elsewhere = not life.avoid_workers.issuperset(self.workers)
            worker_id = self._rooms.least(life.avoid_workers if elsewhere else ())
            if worker_id is None:
                put_off.append(life)
                continue
            workplace = self.workers[worker_id]
            life.worker = worker_id
            if (budget_s := self._begin(life, Stage.INIT, now)) is not None:
                attempt_id = life.attempt_id
                self._attempts[attempt_id] = life
                workplace.put(attempt_id, Slot.INIT)
                self._commands.append(Order(worker_id, StartInit(life.attempt_spec, budget_s)))
                self._rank(workplace)
        for life in put_off:
            self._line.push(life)

    def _admitted(self, policy: str) -> bool:
        """Sandboxes are prepared while no policy has a server, but not for one that has none instead of one that has."""
        return self.servers.serves(policy) or not self.servers.serves_any

    def _begin(self, life: Life, stage: Stage, now: float) -> float | None:
        """The stage's budget in seconds, its clock started; None if nothing of the total is left, and it ended."""
        budget_s = life.budget_s(stage)
        if budget_s <= 0:
            message = f"budgets.total_s={life.budgets.total_s:g} s was used up before {stage}"
            self._discard(life, now)
            self._end(life, Status.TIMED_OUT, Failure(stage, FailureKind.TASK, message))
            return None
        self.counts[life.status] -= 1
        life.begin(stage, now)
        self.counts[life.status] += 1
        self._overdue.add(now + budget_s + self._report_grace_s, (life.attempt_id, stage))
        return budget_s

    def _rank(self, workplace: Workplace) -> None:
        if workplace.room_for_init:
            self._rooms.set(workplace.worker_id, workplace.load)
        else:
            self._rooms.discard(workplace.worker_id)
