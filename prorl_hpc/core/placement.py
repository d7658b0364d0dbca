"""Where attempts are: slots of workers, LLM servers for RUNs, and what starts next."""

from __future__ import annotations

from prorl_hpc.core.balancer import PER_REQUEST, ServerBalancer
from prorl_hpc.core.deadlines import Deadlines
from prorl_hpc.core.events import Command, Order
from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.core.life import Life
from prorl_hpc.core.population import Population
from prorl_hpc.core.workplace import Slot, Workplace
from prorl_hpc.messages.control import (
    Discard,
    MoveRun,
    Pools,
    RequestServers,
    ServerRef,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Failure, FailureKind, Stage, Status

_SLOTS = {Stage.INIT: Slot.INIT, Stage.RUN: Slot.RUN, Stage.EVAL: Slot.EVAL}


class Placement:
    """Commands go to ``said``."""

    def __init__(
        self,
        said: list[Command],
        population: Population,
        *,
        balancing: str,
        report_grace_s: float,
        discard_again_s: float,
    ) -> None:
        """As in Scheduler."""
        self._said = said
        self._population = population
        self._report_grace_s = report_grace_s
        self._discard_again_s = discard_again_s
        self.workers: dict[str, Workplace] = {}
        self.servers = ServerBalancer(balancing)
        self.per_request = balancing == PER_REQUEST
        """Workers choose a server for each request; those of assignments here are in name only."""
        self._told: list[ServerRef] = []
        """What they choose from."""
        self.paused = False
        self.holds: dict[str, float] = {}
        """Until when who holds rollouts back, beside a pause."""
        self.draining = False
        self.attempts: dict[str, Life] = {}
        """Attempts that are on a worker and wanted."""
        self.overdue: Deadlines[tuple[str, str]] = Deadlines()
        """(attempt, stage): when it is no longer waited for."""
        self.discards: Deadlines[tuple[str, str]] = Deadlines()
        """(worker, attempt): when the order to discard it is repeated."""
        self._rooms: LeastLoaded[tuple[float, float]] = LeastLoaded()
        """Workers that have room for an INIT, by how full they are."""
        self._touched: dict[str, None] = {}
        """Workers where something may start."""

    def join(self, worker_id: str, pools: Pools) -> Workplace:
        """A worker is there, for the first time or again."""
        workplace = self.workers.get(worker_id)
        if workplace is None:
            workplace = self.workers[worker_id] = Workplace(worker_id, pools)
        workplace.pools = pools
        self.touch(worker_id)
        if self.per_request:
            self._said.append(Order(worker_id, RequestServers(self._told)))
        return workplace

    def lose(self, worker_id: str) -> Workplace | None:
        """A worker is gone; what was there is the caller's to see to."""
        self._rooms.discard(worker_id)
        return self.workers.pop(worker_id, None)

    def touch(self, worker_id: str) -> None:
        """Look there for what may start."""
        self._touched[worker_id] = None

    def touch_all(self) -> None:
        self._touched.update(dict.fromkeys(self.workers))

    def tell_servers(self, lost: str = "") -> None:
        """Workers that choose for each request are told what has changed."""
        if self.per_request and (lost or self.servers.eligible != self._told):
            self._told = self.servers.eligible
            self._said += [Order(worker_id, RequestServers(self._told, lost)) for worker_id in self.workers]

    # attempts

    def wait_for(self, life: Life, stage: Stage, now: float) -> None:
        """The attempt waits on its worker for RUN or EVAL."""
        ready = stage is Stage.RUN
        self.workers[life.worker].put(life.attempt_id, Slot.READY if ready else Slot.RAN, life.rank)
        self._population.enter(life, Status.READY if ready else Status.RAN, now)

    def go_on(self, life: Life, stage: Stage, since: float) -> None:
        """A stage is at work, or was until now, that was not ordered by this scheduler."""
        self.workers[life.worker].put(life.attempt_id, _SLOTS[stage])
        self._population.enter(life, Status(stage.value), since)
        life.queued_s = 0.0

    def watch_stage(self, life: Life, stage: Stage, budget_s: float, now: float) -> None:
        self.overdue.add(now + budget_s + self._report_grace_s, (life.attempt_id, stage))

    def move(self, life: Life, away_from: str) -> bool:
        """Send a RUN to another server; False, and nothing is done, if there is none."""
        life.avoid_servers |= {away_from}
        server = self.servers.move(life.attempt_id, life.spec.policy, life.avoid_servers)
        if server is None:
            return False
        life.server = server.server_id
        self._said.append(Order(life.worker, MoveRun(life.attempt_id, server)))
        return True

    def replace(self, life: Life, lost: str) -> bool:
        """The server of a RUN is lost; False, and nothing is done, if none takes over. Where workers choose for each
        request they move what was under way there by themselves."""
        if not self.per_request:
            return self.move(life, lost)
        server = self.servers.assign(life.attempt_id, life.spec.policy)
        if server is not None:
            life.server = server.server_id
        return server is not None

    def leave(self, life: Life) -> None:
        """The attempt is over on its worker, and the worker knows it."""
        self.servers.release(life.attempt_id)
        self.attempts.pop(life.attempt_id, None)
        self.gone(life.worker, life.attempt_id)

    def discard(self, life: Life, now: float) -> None:
        """The attempt is over here; its worker, if it has one, is told so."""
        self.servers.release(life.attempt_id)
        if self.attempts.pop(life.attempt_id, None) is not None:
            self.order_discard(life.worker, life.attempt_id, now)

    def order_discard(self, worker_id: str, attempt_id: str, now: float) -> None:
        """Have a worker give up whatever it has under this name; its slot is taken until it says so."""
        workplace = self.workers[worker_id]
        if attempt_id not in workplace:
            workplace.put(attempt_id, Slot.FOREIGN)
        workplace.leaving.add(attempt_id)
        self.discards.add(now + self._discard_again_s, (worker_id, attempt_id))
        self._said.append(Order(worker_id, Discard(attempt_id)))

    def gone(self, worker_id: str, attempt_id: str) -> None:
        """Nothing of the attempt is left there."""
        workplace = self.workers.get(worker_id)
        # A live attempt stays: its name cannot be that of a discarded one.
        if workplace is not None and attempt_id not in self.attempts:
            workplace.remove(attempt_id)
            self._touched[worker_id] = None

    def hold(self, holder: str, until: float) -> None:
        self.holds[holder] = until

    # starting stages

    def start_what_fits(self, now: float) -> None:
        """Later stages first: they free what earlier ones wait for."""
        if self._touched:
            touched, self._touched = self._touched, {}
            for worker_id in touched:
                workplace = self.workers.get(worker_id)
                if workplace is not None:
                    self._start_evals(workplace, now)
                    self._start_runs(workplace, now)
                    self._rank(workplace)
        for holder in [holder for holder, until in self.holds.items() if until <= now]:
            del self.holds[holder]
        if not self.paused and not self.draining and not self.holds:
            self._start_inits(now)

    def _start_evals(self, workplace: Workplace, now: float) -> None:
        while workplace.room_for_eval and (attempt_id := workplace.next_waiting(Slot.RAN)) is not None:
            life = self.attempts[attempt_id]
            if (budget_s := self._begin(life, Stage.EVAL, now)) is not None:
                workplace.put(attempt_id, Slot.EVAL)
                self._said.append(Order(workplace.worker_id, StartEval(attempt_id, budget_s)))

    def _start_runs(self, workplace: Workplace, now: float) -> None:
        serverless: list[Life] = []
        while workplace.room_for_run and (attempt_id := workplace.next_waiting(Slot.READY)) is not None:
            life = self.attempts[attempt_id]
            server = self.servers.assign(attempt_id, life.spec.policy, life.avoid_servers)
            if server is None:
                serverless.append(life)
            elif (budget_s := self._begin(life, Stage.RUN, now)) is not None:
                life.server = server.server_id
                workplace.put(attempt_id, Slot.RUN)
                self._said.append(Order(workplace.worker_id, StartRun(attempt_id, server, budget_s)))
        for life in serverless:
            workplace.put(life.attempt_id, Slot.READY, life.rank)

    def _start_inits(self, now: float) -> None:
        put_off: list[Life] = []
        while len(self._rooms) and (life := self._population.line.pop(self._admitted)) is not None:
            elsewhere = not life.avoid_workers.issuperset(self.workers)
            worker_id = self._rooms.least(life.avoid_workers if elsewhere else ())
            if worker_id is None:
                put_off.append(life)
                continue
            workplace = self.workers[worker_id]
            life.worker = worker_id
            if (budget_s := self._begin(life, Stage.INIT, now)) is not None:
                attempt_id = life.attempt_id
                self.attempts[attempt_id] = life
                workplace.put(attempt_id, Slot.INIT)
                self._said.append(Order(worker_id, StartInit(life.attempt_spec, budget_s)))
                self._rank(workplace)
        for life in put_off:
            self._population.line.push(life)

    def _admitted(self, policy: str) -> bool:
        """Sandboxes are prepared while no policy has a server, but not for one that has none instead of one that has."""
        return self.servers.serves(policy) or not self.servers.serves_any

    def _begin(self, life: Life, stage: Stage, now: float) -> float | None:
        """The stage's budget in seconds, its clock started; None if nothing of the total is left, and it ended."""
        budget_s = life.budget_s(stage)
        if budget_s <= 0:
            message = f"budgets.total_s={life.budgets.total_s:g} s was used up before {stage}"
            self.discard(life, now)
            self._population.end(life, Status.TIMED_OUT, Failure(stage, FailureKind.TASK, message))
            return None
        self._population.counts[life.status] -= 1
        life.begin(stage, now)
        self._population.counts[life.status] += 1
        self.watch_stage(life, stage, budget_s, now)
        return budget_s

    def _rank(self, workplace: Workplace) -> None:
        if workplace.room_for_init:
            self._rooms.set(workplace.worker_id, workplace.load)
        else:
            self._rooms.discard(workplace.worker_id)
