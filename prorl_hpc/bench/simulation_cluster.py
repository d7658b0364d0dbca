"""The cluster that is simulated: workers that take the scheduler's orders under a virtual clock, LLM servers,
failures. An event is a tuple on one heap; whatever it is about is looked at when its time has come.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from prorl_hpc.bench.simulation_attempt import Attempt
from prorl_hpc.bench.simulation_clock import VirtualClock
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_coordinator import CoordinatorStation
from prorl_hpc.bench.simulation_draws import STAGES, Draws, Fate
from prorl_hpc.bench.simulation_gauges import Gauges, Place
from prorl_hpc.bench.simulation_llm import LlmServers
from prorl_hpc.bench.simulation_outages import Outages
from prorl_hpc.bench.simulation_supply import supply_of
from prorl_hpc.bench.simulation_tally import Tally
from prorl_hpc.bench.simulation_times import Floats
from prorl_hpc.core.events import (
    Cancel,
    Ended,
    Event,
    Order,
    ServerSeen,
    Submit,
    Tick,
    WorkerJoined,
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
_AFTER = (Place.READY, Place.RAN)
_FAULTS = tuple(Failure(stage, FailureKind.INFRASTRUCTURE, "a simulated fault") for stage in STAGES)
_OVER_BUDGET = tuple(
    Failure(stage, FailureKind.SANDBOX if stage is STAGES[_INIT] else FailureKind.TASK, "its budget was used up")
    for stage in STAGES
)
_NONE: dict[str, float] = {}
_TICK_S = 1.0
_BUCKET_EVENTS = 500
_LOOK_EVERY = 4096
"""Events between two looks at the wall clock, for the progress display."""


class Cluster:
    """One simulation; ``run`` it once."""

    def __init__(self, config: SimulationConfig, times: Floats | None = None) -> None:
        self._config = config
        self._draws = Draws(config, times)
        self._supply = supply_of(config, self._draws)
        self._scheduler = Scheduler(
            retries=config.retries,
            balancing=config.balancing,
            move_runs=config.when_server_lost == "move",
            abort_cancelled=config.abort_cancelled,
        )
        self.gauges = Gauges()
        self.tally = Tally()
        self._clock = VirtualClock(_BUCKET_EVENTS * self._draws.mean_stage_s / (config.nodes * config.slots))
        self.coordinator = CoordinatorStation(config.coordinator_s, self._clock, self._happened)
        self._todo: deque[Event] = deque()
        self._fates: dict[str, Fate] = {}
        self._attempts: dict[str, Attempt] = {}
        self._outages = Outages(config, self._draws, self._clock, self._happened, self._node_fell)
        self._down = self._outages.down
        self._llms = LlmServers(config.server_concurrency, self._clock, self.gauges, self._served)
        self._counts = self._scheduler.counts
        self._alarm_s = math.inf
        """When the supply is to be woken, as the heap knows."""
        self._two_ways_s = 2 * config.latency_s

    @property
    def batch_s(self) -> list[float]:
        return self._supply.batch_s

    def run(self, look: Callable[[int, float], None] | None = None) -> float:
        """Until all rollouts have ended; returns the virtual seconds that it took. ``look(ended, now)`` is called now
        and then. Raises RunError if nothing can happen any more."""
        self._set_up()
        clock, gauges, supply, tally = self._clock, self.gauges, self._supply, self.tally
        for count in itertools.count(1):
            happening = clock.next()
            if happening is None:
                raise RunError(
                    f"the simulation stands still with {self._scheduler.live} rollouts that have not ended: "
                    f"{dict(self._scheduler.counts)}"
                )
            now, _, act, what = happening
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
            self._scheduler.handle(ServerSeen(ref, 0, True), 0.0)
            self._outages.expect_server(ref, number)
        for number in range(config.nodes):
            worker_id = f"node{number}"
            self._scheduler.handle(WorkerJoined(worker_id, config.pools), 0.0)
            self._outages.expect_node(worker_id, number)
        budgets = config.budgets
        if min(budgets.init_s, budgets.run_s, budgets.eval_s, budgets.total_s, budgets.wall_s) < math.inf:
            self._clock.at(_TICK_S, self._tick, None)
        self._set_alarm()
        self._happened(Tick(), 0.0)

    def _tick(self, _: None, now: float) -> None:
        self._happened(Tick(), now)
        self._clock.at(now + _TICK_S, self._tick, None)

    # between the scheduler, the supply and the workers

    def _happened(self, event: Event, now: float) -> None:
        """Tell the scheduler, then what follows of it, one after the other; and keep the queue from running dry."""
        todo: Event | None = event
        while todo is not None:
            for command in self._scheduler.handle(todo, now):
                if isinstance(command, Order):
                    _ORDERS[type(command.message)](self, command.worker_id, command.message, now)
                elif isinstance(command, Ended):
                    self._ended(command.result, now)
            if self._counts[Status.QUEUED] < self._supply.low_mark:
                self._take(self._supply.more())
            todo = self._todo.popleft() if self._todo else None

    def _wake(self, _: None, now: float) -> None:
        self._alarm_s = math.inf
        self._take(self._supply.woken(now))
        self._set_alarm()
        if self._todo:
            self._happened(self._todo.popleft(), now)

    def _set_alarm(self) -> None:
        if self._supply.wake_s < self._alarm_s:
            self._alarm_s = self._supply.wake_s
            self._clock.at(self._alarm_s, self._wake, None)

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
        moves = self._supply.ended(result, now)
        if moves is not None:
            self._take(moves)
            self._set_alarm()

    # stages

    def _start_init(self, worker_id: str, order: StartInit, now: float) -> None:
        attempt_id = order.spec.rollout_id
        rollout_id, mark, _ = attempt_id.partition(ATTEMPT_MARK)
        fate = self._fates[rollout_id]
        fault, share = (fate[3], fate[4]) if not mark else self._draws.fault(attempt_id)
        if worker_id in self._down:
            return
        attempt = self._attempts[attempt_id] = Attempt(attempt_id, worker_id, fate, fault, share)
        self.gauges.enter(Place.INIT, now)
        self._start(attempt, _INIT, order.budget_s, now)

    def _start_run(self, worker_id: str, order: StartRun, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is None:
            return
        self._enter(attempt, Place.RUN, now)
        attempt.server_id = order.server.server_id
        config = self._config
        if not config.server_concurrency or not config.generation_share:
            self._start(attempt, _RUN, order.budget_s, now)
            return
        attempt.stage, attempt.began, attempt.timed_out = _RUN, now, False
        run_s = attempt.fate[_RUN] * (attempt.share if attempt.fault == _RUN else 1.0)
        attempt.turn_s = run_s * config.generation_share / config.turns
        attempt.tool_s = run_s * (1 - config.generation_share) / config.turns
        attempt.turns_left = config.turns
        if order.budget_s < math.inf:
            self._clock.at(now + order.budget_s + self._two_ways_s, self._run_over_budget, attempt)
        self._llms.serve(attempt, attempt.turn_s, now)

    def _start_eval(self, worker_id: str, order: StartEval, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is not None:
            self._enter(attempt, Place.EVAL, now)
            self._start(attempt, _EVAL, order.budget_s, now)

    def _start(self, attempt: Attempt, stage: int, budget_s: float, now: float) -> None:
        """A stage that takes its time and nothing else."""
        busy_s = attempt.fate[stage]
        if attempt.fault == stage:
            busy_s *= attempt.share
        attempt.timed_out = busy_s > budget_s
        if attempt.timed_out:
            busy_s = budget_s
        attempt.stage, attempt.began = stage, now
        self._clock.at(now + busy_s + self._two_ways_s, self._stage_over, attempt)

    def _stage_over(self, attempt: Attempt, now: float) -> None:
        if attempt.gone:
            return
        stage, attempt_id, reward = attempt.stage, attempt.attempt_id, None
        failure = _OVER_BUDGET[stage] if attempt.timed_out else _FAULTS[stage] if attempt.fault == stage else None
        if failure is None and stage != _EVAL:
            self._enter(attempt, _AFTER[stage], now)
        else:
            self._drop(attempt, now)
            if failure is None:
                reward = self._supply.reward(attempt_id.partition(ATTEMPT_MARK)[0])
        busy_s = now - attempt.began - self._two_ways_s
        timed_out = attempt.timed_out
        self.coordinator.told(
            StageFinished(
                attempt.worker_id, attempt_id, STAGES[stage], failure, timed_out, None, reward, _NONE, busy_s
            ),
            now,
        )

    def _enter(self, attempt: Attempt, place: int, now: float) -> None:
        self.gauges.move(attempt.place, place, now)
        attempt.place = place

    def _drop(self, attempt: Attempt, now: float) -> None:
        """It no longer is on its worker."""
        attempt.gone = True
        self.gauges.leave(attempt.place, now)
        del self._attempts[attempt.attempt_id]
        self._llms.stop(attempt, now)

    def _discard(self, worker_id: str, order: Discard, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is not None:
            attempt.gone = True
            self._llms.stop(attempt, now)
        if worker_id not in self._down:
            self._clock.at(now + self._two_ways_s, self._discarded, (worker_id, order.rollout_id))

    def _discarded(self, what: tuple[str, str], now: float) -> None:
        worker_id, attempt_id = what
        if worker_id in self._down:
            return
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._drop(attempt, now)
        self.coordinator.told(Discarded(worker_id, attempt_id), now)

    # turns of a RUN: the LLM server's part, then the sandbox's

    def _served(self, attempt: Attempt, now: float) -> None:
        self._clock.at(now + attempt.tool_s, self._turn_over, attempt)

    def _turn_over(self, attempt: Attempt, now: float) -> None:
        if attempt.gone:
            return
        attempt.turns_left -= 1
        if attempt.turns_left:
            self._llms.serve(attempt, attempt.turn_s, now)
        elif self._two_ways_s:
            self._clock.at(now + self._two_ways_s, self._stage_over, attempt)
        else:
            self._stage_over(attempt, now)

    def _run_over_budget(self, attempt: Attempt, now: float) -> None:
        if not attempt.gone and attempt.place == Place.RUN:
            attempt.timed_out = True
            self._stage_over(attempt, now)

    def _move_run(self, worker_id: str, order: MoveRun, now: float) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is not None and order.server is not None:
            self._llms.move(attempt, order.server.server_id, now)

    def _node_fell(self, worker_id: str, now: float) -> None:
        for attempt_id in self._scheduler.workers[worker_id]:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                self._drop(attempt, now)


_ORDERS: dict[type, Callable[[Cluster, str, Any, float], None]] = {
    StartInit: Cluster._start_init,
    StartRun: Cluster._start_run,
    StartEval: Cluster._start_eval,
    Discard: Cluster._discard,
    MoveRun: Cluster._move_run,
}
