"""The stage scheduler: a state machine over rollouts, workers and LLM servers, without I/O and without a clock.

``handle(event, now)`` returns what is to be done; ``now`` is any clock that does not go back, in seconds.

Invariants, kept by tests/core/test_core_scheduler_machine.py under any order of events:
every accepted rollout gets exactly one Ended; no pool of a worker exceeds its size; every attempt that was
started on a worker is reported over by it, discarded there, or lost with it; a server's assignments are
exactly the attempts in RUN on it; while workers and servers are there, what waits gets its turn.
"""

from __future__ import annotations

from prorl_hpc.core.events import (
    Cancel,
    Command,
    Drain,
    Event,
    Hold,
    Order,
    Pause,
    Recover,
    ServerDrains,
    ServerLost,
    ServerSeen,
    Submit,
    Tick,
    Wake,
    WorkerDrains,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.life import Life, split_attempt_id
from prorl_hpc.core.placement import Placement
from prorl_hpc.core.population import Population
from prorl_hpc.core.stale_runs import StaleRuns
from prorl_hpc.core.workplace import Workplace
from prorl_hpc.messages.control import (
    Discarded,
    Held,
    MoveRun,
    ServerTrouble,
    StageFinished,
)
from prorl_hpc.messages.rollout import Failure, FailureKind, Stage, Status

_STAGES = {Status.INIT: Stage.INIT, Status.RUN: Stage.RUN, Status.EVAL: Stage.EVAL}


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
        abort_cancelled: bool = True,
    ) -> None:
        """``retries``: attempts beyond the first. ``report_grace_s``: how long after a stage's budget a worker that
        has not reported it is no longer waited for. ``discard_again_s``: when an unanswered Discard is repeated.
        ``balancing`` as in ServerBalancer. ``move_runs``: a lost server's RUNs go on elsewhere, if they can.
        Without ``abort_cancelled`` what is cancelled in RUN goes on there, as core.stale_runs has it."""
        self._move_runs = move_runs
        self._abort_cancelled = abort_cancelled
        self._said: list[Command] = []
        self._population = Population(self._said, retries=retries)
        self._placement = Placement(
            self._said,
            self._population,
            balancing=balancing,
            report_grace_s=report_grace_s,
            discard_again_s=discard_again_s,
        )
        self._stale = StaleRuns(self._placement)
        self.workers = self._placement.workers
        self.servers = self._placement.servers
        self.counts = self._population.counts
        """Rollouts by status now; finished ones since the start."""

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case StageFinished():
                self._stage_finished(event, now)
            case Submit():
                for spec in event.specs:
                    self._population.line.push(self._population.accept(spec, now))
            case Discarded():
                self._discarded(event)
            case Tick():
                self._tick(now)
            case Cancel():
                for rollout_id in event.rollout_ids:
                    self._cancel(rollout_id, now)
            case ServerTrouble():
                self._server_trouble(event, now)
            case _:
                self._membership(event, now)
        self._placement.start_what_fits(now)
        said = self._said[:]
        self._said.clear()
        return said

    def _membership(self, event: Event, now: float) -> None:
        match event:
            case WorkerJoined():
                self._worker_joined(event, now)
            case WorkerLost():
                self._worker_lost(event, now)
            case WorkerDrains():
                if event.worker_id in self.workers:
                    self.workers[event.worker_id].draining = event.on
                    self._placement.touch(event.worker_id)
            case ServerSeen():
                if self.servers.seen(event.ref, event.weight_version, event.healthy):
                    self._placement.touch_all()
            case ServerLost():
                self._server_lost(event, now)
            case ServerDrains():
                self.servers.drain(event.server_id, event.on)
                self._placement.touch_all()
            case Pause():
                self._placement.paused = event.on
            case Hold():
                self._placement.hold(event.holder, now + event.for_s)
            case Drain():
                self._placement.draining = self._population.draining = True
            case Recover():
                self._population.recover(event, now)
            case Wake():
                self._population.wake(event.rollout_ids, now)
        self._placement.tell_servers()

    def life(self, rollout_id: str) -> Life | None:
        """A rollout that has not ended, to look at."""
        return self._population.lives.get(rollout_id)

    @property
    def paused(self) -> bool:
        return self._placement.paused

    def holds(self, now: float) -> dict[str, float]:
        """Who holds rollouts back beside a pause, and for how many seconds more."""
        return {holder: until - now for holder, until in self._placement.holds.items() if until > now}

    @property
    def draining(self) -> bool:
        return self._placement.draining

    @property
    def under_way(self) -> int:
        """Rollouts that have started and will go on: those that wait for RUN, and no server is there, do not."""
        return sum(
            life.status is not Status.QUEUED
            and (life.status is not Status.READY or self.servers.serves(life.spec.policy))
            for life in self._population.lives.values()
        )

    @property
    def lives(self) -> list[Life]:
        """All that have not ended, in the order of their acceptance."""
        return list(self._population.lives.values())

    @property
    def live(self) -> int:
        """Rollouts that have not ended."""
        return len(self._population.lives)

    # rollouts

    def _cancel(self, rollout_id: str, now: float) -> None:
        life = self._population.lives.get(rollout_id)
        if life is not None:
            if not self._abort_cancelled and life.status is Status.RUN and life.attempt_id in self._placement.attempts:
                self._stale.let_go_on(life)
            else:
                self._placement.discard(life, now)
            self._population.end(life, Status.CANCELLED)

    def _stage_finished(self, event: StageFinished, now: float) -> None:
        life = self._placement.attempts.get(event.rollout_id)
        if life is None or life.worker != event.worker_id or _STAGES.get(life.status) != event.stage:
            # Of an attempt that was given up, or said twice. A failure and EVAL leave nothing behind on the worker,
            # but a discard that is under way is answered all the same, and frees the slot then.
            self._stale.finished(event, now)
            return
        life.end_stage(event.stage, event.busy_s, now)
        if event.trajectory is not None:
            life.trajectory = event.trajectory
        if event.stage is Stage.RUN:
            life.finish, life.generated_tokens = event.finish, event.generated_tokens
            self.servers.release(event.rollout_id)
        self._placement.touch(event.worker_id)
        if event.failure is not None:
            self._placement.leave(life)
            self._population.retry_or_fail(life, event.failure, now, timed_out=event.timed_out)
        elif event.stage is Stage.EVAL:
            self._placement.leave(life)
            self._population.end(life, Status.DONE, None, event.reward, event.metrics)
        else:
            self._placement.wait_for(life, Stage.RUN if event.stage is Stage.INIT else Stage.EVAL, now)

    def _discarded(self, event: Discarded) -> None:
        self._placement.gone(event.worker_id, event.rollout_id)
        life = self._population.ending.get(event.rollout_id)
        if life is not None and life.worker == event.worker_id:
            self._population.end_as_ruled(life, event.trajectory)

    # workers

    def _worker_joined(self, event: WorkerJoined, now: float) -> None:
        workplace = self._placement.join(event.worker_id, event.pools)
        for attempt_id in sorted(set(workplace) - {held.rollout_id for held in event.held}):
            life = self._placement.attempts.get(attempt_id)
            if life is None:
                # Being discarded: the worker's answer, not its silence, says that it is gone.
                if not self._stale.end(attempt_id, now):
                    self._placement.order_discard(event.worker_id, attempt_id, now)
                continue
            message = f"worker {event.worker_id} no longer holds it: was it started anew?"
            failure = Failure(_STAGES.get(life.status), FailureKind.INFRASTRUCTURE, message)
            # Discarded nevertheless: the order to start it may have crossed with the Hello.
            self._placement.discard(life, now)
            self._population.retry_or_fail(life, failure, now)
        for held in event.held:
            known = self._placement.attempts.get(held.rollout_id)
            if known is not None and known.worker == event.worker_id:
                self._catch_up(known, held, now)
            elif not self._stale.end(held.rollout_id, now) and not self._adopt(workplace, held, now):
                self._placement.order_discard(event.worker_id, held.rollout_id, now)

    def _catch_up(self, life: Life, held: Held, now: float) -> None:
        """The line was cut: reports and orders that were on their way are lost."""
        for report in held.reports:
            if _STAGES.get(life.status) is report.stage:
                self._stage_finished(report, now)
        stage = _STAGES.get(life.status)
        if stage is None or stage is held.running or held.rollout_id not in self._placement.attempts:
            return
        if stage is Stage.INIT:
            message = f"worker {life.worker} holds it without having started it"
            self._placement.discard(life, now)
            self._population.retry_or_fail(life, Failure(stage, FailureKind.INFRASTRUCTURE, message), now)
            return
        self.servers.release(held.rollout_id)
        self._placement.wait_for(life, stage, now)

    def _adopt(self, workplace: Workplace, held: Held, now: float) -> bool:
        """Go on with an attempt that was started before this state was made; False if it is not wanted."""
        rollout_id, attempt = split_attempt_id(held.rollout_id)
        life = self._population.lives.get(rollout_id)
        if life is None or life.status is not Status.QUEUED or attempt < life.attempt:
            return False
        if held.running is None and not held.reports:
            return False
        self._population.adopted(rollout_id, now)
        life.attempt, life.worker = attempt, workplace.worker_id
        self._placement.attempts[held.rollout_id] = life
        for report in held.reports:
            self._placement.go_on(life, report.stage, now - report.busy_s)
            self._stage_finished(report, now)
        if held.running is not None and held.rollout_id in self._placement.attempts:
            self._placement.go_on(life, held.running, now)
            self._placement.watch_stage(life, held.running, life.budget_s(held.running), now)
            if held.server is not None:
                life.server = held.server.server_id
                self.servers.adopt(held.rollout_id, held.server)
        return True

    def _worker_lost(self, event: WorkerLost, now: float) -> None:
        workplace = self._placement.lose(event.worker_id)
        if workplace is None:
            return
        for attempt_id in workplace:
            self._stale.forget(attempt_id)
            life = self._placement.attempts.pop(attempt_id, None)
            if life is not None:
                self.servers.release(attempt_id)
                message = f"worker {event.worker_id} was lost: {event.reason}"
                failure = Failure(_STAGES.get(life.status), FailureKind.INFRASTRUCTURE, message)
                self._population.retry_or_fail(life, failure, now, spare=event.left)
            elif (ending := self._population.ending.get(attempt_id)) is not None and ending.worker == event.worker_id:
                self._population.end_as_ruled(ending, None)

    # LLM servers

    def _server_lost(self, event: ServerLost, now: float) -> None:
        self._placement.touch_all()
        for attempt_id in self.servers.lost(event.server_id):
            if self._stale.end(attempt_id, now):
                continue
            life = self._placement.attempts[attempt_id]
            if (self._move_runs or self._placement.per_request) and self._placement.replace(life, event.server_id):
                continue
            message = f"LLM server {event.server_id} was lost: {event.reason}"
            self._placement.discard(life, now)
            failure = Failure(Stage.RUN, FailureKind.INFERENCE, message)
            self._population.retry_or_fail(life, failure, now, blame=False, spare=event.left)
        self._placement.tell_servers(lost=event.server_id)

    def _server_trouble(self, event: ServerTrouble, now: float) -> None:
        self._stale.end(event.rollout_id, now)
        life = self._placement.attempts.get(event.rollout_id)
        if life is None or life.worker != event.worker_id or life.status is not Status.RUN:
            return
        # One that was moved meanwhile has been told so: its worker asked before it knew.
        concerned = self._placement.per_request or life.server == event.server_id
        if concerned and not (self._move_runs and self._placement.move(life, event.server_id)):
            self._said.append(Order(life.worker, MoveRun(event.rollout_id, None)))

    # time

    def _tick(self, now: float) -> None:
        for wall_end, rollout_id in self._population.walls.due(now):
            life = self._population.lives.get(rollout_id)
            if life is not None and life.wall_end == wall_end:
                self._hit_the_wall(life, now)
        for _, (attempt_id, stage) in self._placement.overdue.due(now):
            life = self._placement.attempts.get(attempt_id)
            if life is not None and _STAGES.get(life.status) == stage:
                message = f"worker {life.worker} did not report the end of {stage} when its budget was over"
                self._placement.discard(life, now)
                self._population.retry_or_fail(life, Failure(Stage(stage), FailureKind.INFRASTRUCTURE, message), now)
            elif stage == Stage.RUN:
                self._stale.end(attempt_id, now)
        for _, (worker_id, attempt_id) in self._placement.discards.due(now):
            workplace = self.workers.get(worker_id)
            if workplace is not None and attempt_id in workplace.leaving:
                self._placement.order_discard(worker_id, attempt_id, now)
                if (ending := self._population.ending.get(attempt_id)) is not None:
                    self._population.end_as_ruled(ending, None)
        self._population.end_grace(now)

    def _hit_the_wall(self, life: Life, now: float) -> None:
        message = f"it took more than budgets.wall_s={life.budgets.wall_s:g} s, queues counted ({life.status})"
        failure = Failure(_STAGES.get(life.status), FailureKind.TASK, message)
        if life.status is Status.RUN and life.attempt_id in self._placement.attempts:
            self._population.await_last_word(life, Status.TIMED_OUT, failure)
            self._placement.discard(life, now)
        else:
            self._placement.discard(life, now)
            self._population.end(life, Status.TIMED_OUT, failure)
