"""The cluster that is simulated: workers that take the scheduler's orders under a virtual clock, LLM servers,
failures. An event is a tuple on one heap; whatever it is about is looked at when its time has come.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import NO_FAULT, STAGES, Draws, Fate
from prorl_hpc.bench.simulation_gauges import Gauges, Place
from prorl_hpc.bench.simulation_servers import SharedServer
from prorl_hpc.bench.simulation_supply import supply_of
from prorl_hpc.bench.simulation_tally import Tally
from prorl_hpc.core.events import (
    Cancel,
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
from prorl_hpc.core.groups import Moves
from prorl_hpc.core.life import ATTEMPT_MARK
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    MoveRun,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Status

_INIT, _RUN, _EVAL = 0, 1, 2
_PLACES = (Place.INIT, Place.RUN, Place.EVAL)
_AFTER = (Place.READY, Place.RAN)
_FAULTS = tuple(Failure(stage, FailureKind.INFRASTRUCTURE, "a simulated fault") for stage in STAGES)
_OVER_BUDGET = tuple(
    Failure(stage, FailureKind.SANDBOX if stage is STAGES[_INIT] else FailureKind.TASK, "its budget was used up")
    for stage in STAGES
)
_TICK_S = 1.0
_LOOK_EVERY = 4096
"""Events between two looks at the wall clock, for the progress display."""


class _Attempt:
    """One attempt on one worker. ``gone``: nothing that is foretold of it comes true."""

    __slots__ = (
        "attempt_id", "began", "budget_s", "fate", "fault", "gone", "place", "server_id",
        "share", "stage", "ticket", "tool_s", "turn_s", "turns_left", "worker_id",
    )  # fmt: skip

    def __init__(self, attempt_id: str, worker_id: str, fate: Fate, fault: int, share: float) -> None:
        self.attempt_id, self.worker_id, self.fate = attempt_id, worker_id, fate
        self.fault, self.share = fault, share
        self.gone = False
        self.place: int = Place.INIT
        self.stage = _INIT
        self.server_id = ""
        self.ticket = -1
        """Of the request that a server works on now; -1 if none does."""


class Cluster:
    """One simulation; ``run`` it once."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._draws = Draws(config)
        self._supply = supply_of(config, self._draws)
        self._scheduler = Scheduler(
            retries=config.retries, balancing=config.balancing, move_runs=config.when_server_lost == "move"
        )
        self.gauges = Gauges()
        self.tally = Tally()
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._sequence = itertools.count()
        self._todo: deque[Event] = deque()
        self._fates: dict[str, Fate] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._down: set[str] = set()
        self._servers: dict[str, SharedServer[_Attempt]] = {}
        self._planned: dict[str, float] = {}
        self._wake_at = math.inf
        self._two_ways_s = 2 * config.latency_s

    @property
    def batch_s(self) -> list[float]:
        return self._supply.batch_s

    def run(self, look: Callable[[int, float], None] | None = None) -> float:
        """Until all rollouts have ended; returns the virtual seconds that it took. ``look(ended, now)`` is called now
        and then. Raises RunError if nothing can happen any more."""
        self._set_up()
        heap, gauges, supply, tally = self._heap, self.gauges, self._supply, self.tally
        for count in itertools.count(1):
            if not heap:
                raise RunError(
                    f"the simulation stands still with {self._scheduler.live} rollouts that have not ended: "
                    f"{dict(self._scheduler.counts)}"
                )
            now, _, act, what = heapq.heappop(heap)
            if now >= gauges.next_point_s:
                gauges.note(now, tally.done)
            act(what, now)
            if supply.complete and tally.ended == tally.submitted:
                break
            if look is not None and not count % _LOOK_EVERY:
                look(tally.ended, now)
        self.tally.events = count
        gauges.note(now, tally.done)
        return now

    # setting up

    def _set_up(self) -> None:
        config = self._config
        for number in range(config.servers):
            ref = ServerRef(f"server{number}", "", "", "")
            if config.server_concurrency:
                self._servers[ref.server_id] = SharedServer(config.server_concurrency)
            self._tell(ServerSeen(ref, 0, True), 0.0)
            if config.server_mtbf_s:
                self._live(self._server_fails, ref, self._draws.up_times(1, number, config.server_mtbf_s), 0.0)
        for number in range(config.nodes):
            worker_id = f"node{number}"
            self._tell(WorkerJoined(worker_id, config.pools), 0.0)
            if config.node_mtbf_s:
                self._live(self._node_fails, worker_id, self._draws.up_times(0, number, config.node_mtbf_s), 0.0)
        budgets = config.budgets
        if min(budgets.init_s, budgets.run_s, budgets.eval_s, budgets.total_s, budgets.wall_s) < math.inf:
            self._at(_TICK_S, self._tick, None)
        self._feed(0.0)

    def _at(self, time: float, act: Callable[[Any, float], None], what: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._sequence), act, what))

    def _live(self, fails: Callable[[Any, float], None], what: Any, up_times: Iterator[float], now: float) -> None:
        self._at(now + next(up_times), fails, (what, up_times))

    def _tick(self, _: None, now: float) -> None:
        self._tell(Tick(), now)
        self._feed(now)
        self._at(now + _TICK_S, self._tick, None)

    # between the scheduler, the supply and the workers

    def _happened(self, event: Event, now: float) -> None:
        self._tell(event, now)
        self._feed(now)

    def _tell(self, event: Event, now: float) -> None:
        """The event, and then what follows of it; one after the other, as the scheduler says it."""
        todo = self._todo
        todo.append(event)
        while todo:
            for command in self._scheduler.handle(todo.popleft(), now):
                kind = type(command)
                if kind is Order:
                    _ORDERS[type(command.message)](self, command.worker_id, command.message, now)
                elif kind is Ended:
                    self._ended(command.result, now)

    def _feed(self, now: float) -> None:
        """Keep the queue from running dry, and the supply's alarm set."""
        specs = self._supply.low(self._scheduler.counts[Status.QUEUED])
        while specs:
            self._follow(Moves(submit=specs), now)
            specs = self._supply.low(self._scheduler.counts[Status.QUEUED])
        if self._supply.wake_s != self._wake_at:
            self._wake_at = self._supply.wake_s
            if self._wake_at < math.inf:
                self._at(self._wake_at, self._wake, None)

    def _wake(self, _: None, now: float) -> None:
        self._wake_at = math.inf
        self._follow(self._supply.woken(now), now)
        self._feed(now)

    def _follow(self, moves: Moves, now: float) -> None:
        self._take(moves)
        if self._todo:
            self._tell(self._todo.popleft(), now)

    def _take(self, moves: Moves) -> None:
        if moves.cancel:
            self._todo.append(Cancel(moves.cancel))
        if moves.submit:
            for spec in moves.submit:
                self._fates[spec.rollout_id] = self._supply.fate(spec)
            self.tally.submitted += len(moves.submit)
            self._todo.append(Submit(moves.submit))

    def _ended(self, result: RolloutResult, now: float) -> None:
        self.tally.note(result, self._fates.pop(result.rollout_id), now)
        self._take(self._supply.ended(result, now))

    # stages

    def _start_init(self, worker_id: str, order: StartInit, now: float) -> None:
        attempt_id = order.spec.rollout_id
        rollout_id, mark, _ = attempt_id.partition(ATTEMPT_MARK)
        fate = self._fates[rollout_id]
        fault, share = (fate[3], fate[4]) if not mark else self._draws.fault(attempt_id)
        if worker_id in self._down:
            return
        attempt = self._attempts[attempt_id] = _Attempt(attempt_id, worker_id, fate, fault, share)
        self.gauges.enter(Place.INIT, now)
        self._start(attempt, _INIT, order.budget_s, now)

    def _start_run(self, worker_id: str, order: StartRun, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is None:
            return
        self._enter(attempt, Place.RUN, now)
        attempt.server_id = order.server.server_id
        config = self._config
        if not self._servers or not config.generation_share:
            self._start(attempt, _RUN, order.budget_s, now)
            return
        attempt.stage, attempt.began, attempt.budget_s = _RUN, now, order.budget_s
        run_s = attempt.fate[_RUN] * (attempt.share if attempt.fault == _RUN else 1.0)
        attempt.turn_s = run_s * config.generation_share / config.turns
        attempt.tool_s = run_s * (1 - config.generation_share) / config.turns
        attempt.turns_left = config.turns
        if order.budget_s < math.inf:
            self._at(now + order.budget_s + self._two_ways_s, self._run_over_budget, attempt)
        self._generate(attempt, now)

    def _start_eval(self, worker_id: str, order: StartEval, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is not None:
            self._enter(attempt, Place.EVAL, now)
            self._start(attempt, _EVAL, order.budget_s, now)

    def _start(self, attempt: _Attempt, stage: int, budget_s: float, now: float) -> None:
        """A stage that takes its time and nothing else."""
        busy_s = attempt.fate[stage]
        if attempt.fault == stage:
            busy_s *= attempt.share
        if busy_s > budget_s:
            busy_s = budget_s
        attempt.stage, attempt.began, attempt.budget_s = stage, now, budget_s
        self._at(now + busy_s + self._two_ways_s, self._stage_over, attempt)

    def _stage_over(self, attempt: _Attempt, now: float) -> None:
        if attempt.gone:
            return
        stage = attempt.stage
        busy_s = now - attempt.began - self._two_ways_s
        failure = _FAULTS[stage] if attempt.fault == stage else None
        # The fate may say more than the budget allows; rounding must not make a fault of what just fits.
        timed_out = busy_s >= attempt.budget_s
        if timed_out and (not self._servers or stage != _RUN):
            timed_out = attempt.fate[stage] * (attempt.share if failure is not None else 1.0) > attempt.budget_s
        self._report(attempt, _OVER_BUDGET[stage] if timed_out else failure, timed_out, max(0.0, busy_s), now)

    def _report(self, attempt: _Attempt, failure: Failure | None, timed_out: bool, busy_s: float, now: float) -> None:
        stage = attempt.stage
        attempt_id, reward = attempt.attempt_id, None
        if failure is not None or stage == _EVAL:
            self._drop(attempt, now)
            reward = None if failure is not None else self._supply.reward(attempt_id.partition(ATTEMPT_MARK)[0])
        else:
            self._enter(attempt, _AFTER[stage], now)
        report = StageFinished(
            attempt.worker_id, attempt_id, STAGES[stage], failure, timed_out, reward=reward, busy_s=busy_s
        )
        self._happened(report, now)

    def _enter(self, attempt: _Attempt, place: int, now: float) -> None:
        self.gauges.leave(attempt.place, now)
        self.gauges.enter(place, now)
        attempt.place = place

    def _drop(self, attempt: _Attempt, now: float) -> None:
        """It no longer is on its worker."""
        attempt.gone = True
        self.gauges.leave(attempt.place, now)
        del self._attempts[attempt.attempt_id]
        self._stop_generating(attempt, now)

    def _discard(self, worker_id: str, order: Discard, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is not None:
            attempt.gone = True
            self._stop_generating(attempt, now)
        if worker_id not in self._down:
            self._at(now + self._two_ways_s, self._discarded, (worker_id, order.rollout_id))

    def _discarded(self, what: tuple[str, str], now: float) -> None:
        worker_id, attempt_id = what
        if worker_id in self._down:
            return
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._drop(attempt, now)
        self._happened(Discarded(worker_id, attempt_id), now)

    # LLM servers

    def _generate(self, attempt: _Attempt, now: float) -> None:
        """A turn begins: the server's part first."""
        server = self._servers[attempt.server_id]
        self._serve(server, attempt, attempt.turn_s, now)
        self._foresee(attempt.server_id, now)

    def _serve(self, server: SharedServer[_Attempt], attempt: _Attempt, work_s: float, now: float) -> None:
        busy = server.busy
        attempt.ticket = server.arrive(attempt, work_s, now)
        self.gauges.add(Place.SERVED, server.busy - busy, now)

    def _stop_generating(self, attempt: _Attempt, now: float) -> float:
        """Take its request away; returns the seconds of work that were left."""
        if attempt.ticket < 0:
            return 0.0
        server = self._servers[attempt.server_id]
        busy = server.busy
        left_s = server.remove(attempt.ticket, now)
        attempt.ticket = -1
        self.gauges.add(Place.SERVED, server.busy - busy, now)
        self._foresee(attempt.server_id, now)
        return left_s

    def _foresee(self, server_id: str, now: float) -> None:
        """Put the server's next departure on the heap, if it is not there."""
        due = self._servers[server_id].next_due()
        planned = self._planned.get(server_id, math.inf)
        if due is None:
            self._planned.pop(server_id, None)
        elif abs(due - planned) > 1e-9 * due:
            self._planned[server_id] = due
            self._at(due, self._departure, server_id)

    def _departure(self, server_id: str, now: float) -> None:
        if self._planned.get(server_id) != now:
            return
        del self._planned[server_id]
        server = self._servers[server_id]
        busy = server.busy
        attempt = server.due(now)
        self.gauges.add(Place.SERVED, server.busy - busy, now)
        self._foresee(server_id, now)
        if attempt is not None:
            attempt.ticket = -1
            self._at(now + attempt.tool_s, self._turn_over, attempt)

    def _turn_over(self, attempt: _Attempt, now: float) -> None:
        if attempt.gone:
            return
        attempt.turns_left -= 1
        if attempt.turns_left:
            self._generate(attempt, now)
        elif self._two_ways_s:
            self._at(now + self._two_ways_s, self._stage_over, attempt)
        else:
            self._stage_over(attempt, now)

    def _run_over_budget(self, attempt: _Attempt, now: float) -> None:
        if not attempt.gone and attempt.place == Place.RUN:
            self._stop_generating(attempt, now)
            self._report(attempt, _OVER_BUDGET[_RUN], True, attempt.budget_s, now)

    def _move_run(self, worker_id: str, order: MoveRun, now: float) -> None:
        """The work done stays done."""
        attempt = self._attempts.get(order.rollout_id)
        if attempt is None or not self._servers or order.server is None:
            return
        generating = attempt.ticket >= 0
        left_s = self._stop_generating(attempt, now)
        attempt.server_id = order.server.server_id
        if generating:
            self._serve(self._servers[attempt.server_id], attempt, left_s, now)
            self._foresee(attempt.server_id, now)

    # failures of machines

    def _server_fails(self, what: tuple[ServerRef, Iterator[float]], now: float) -> None:
        self._at(now + self._config.server_down_s, self._server_returns, what)
        self._happened(ServerLost(what[0].server_id, "a simulated fault"), now)

    def _server_returns(self, what: tuple[ServerRef, Iterator[float]], now: float) -> None:
        self._live(self._server_fails, *what, now)
        self._happened(ServerSeen(what[0], 0, True), now)

    def _node_fails(self, what: tuple[str, Iterator[float]], now: float) -> None:
        worker_id = what[0]
        self._down.add(worker_id)
        for attempt_id in self._scheduler.workers[worker_id]:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                self._drop(attempt, now)
        if self._config.lost_after_s < self._config.node_down_s:
            self._at(now + self._config.lost_after_s, self._node_lost, worker_id)
        self._at(now + self._config.node_down_s, self._node_returns, what)

    def _node_lost(self, worker_id: str, now: float) -> None:
        self._happened(WorkerLost(worker_id, "a simulated fault"), now)

    def _node_returns(self, what: tuple[str, Iterator[float]], now: float) -> None:
        self._down.discard(what[0])
        self._live(self._node_fails, *what, now)
        self._happened(WorkerJoined(what[0], self._config.pools), now)


_ORDERS: dict[type, Callable[[Cluster, str, Any, float], None]] = {
    StartInit: Cluster._start_init,
    StartRun: Cluster._start_run,
    StartEval: Cluster._start_eval,
    Discard: Cluster._discard,
    MoveRun: Cluster._move_run,
}
assert NO_FAULT[0] < 0
