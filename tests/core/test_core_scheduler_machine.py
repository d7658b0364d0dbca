"""The scheduler against a model of the world, under any order of events.

The world obeys orders as workers do: it holds attempts, runs stages, frees sandboxes, answers discards late. What it
sees, not what the scheduler believes, is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prorl_hpc.core.balancer import PER_REQUEST
from prorl_hpc.core.events import (
    Cancel,
    Ended,
    Event,
    Hold,
    Order,
    Pause,
    Recover,
    Retried,
    ServerDrains,
    ServerLost,
    ServerSeen,
    Submit,
    Tick,
    Unfinished,
    WorkerDrains,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    MoveRun,
    Pools,
    RequestServers,
    ServerRef,
    ServerTrouble,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Budgets, Failure, FailureKind, RolloutSpec, Stage, Status

POOLS = Pools(init=2, ready=3, run=2, eval=1)
WORKERS = ["w0", "w1", "w2"]
SERVERS = ["s0", "s1"]
STAGE_OF = {StartInit: Stage.INIT, StartRun: Stage.RUN, StartEval: Stage.EVAL}


def ref(server_id: str) -> ServerRef:
    return ServerRef(server_id, "n", "ipc://x", "")


@dataclass
class World:
    """One worker. ``held``: attempt → stage that runs, None between stages. ``finals``: last reports that the
    coordinator has not heard. ``choice``: servers that requests may go to, if it chooses for each."""

    held: dict[str, Stage | None] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    discards: list[str] = field(default_factory=list)
    reports: dict[str, list[StageFinished]] = field(default_factory=dict)
    finals: dict[str, list[StageFinished]] = field(default_factory=dict)
    choice: list[str] | None = None

    def hello(self) -> tuple[Held, ...]:
        """All that it holds; the last reports are told thereby."""
        finals, self.finals = self.finals, {}
        living = [
            Held(a, list(self.reports.get(a, [])), stage, ref(self.server[a]) if stage is Stage.RUN else None)
            for a, stage in self.held.items()
        ]
        return (*living, *(Held(a, reports) for a, reports in finals.items()))

    def end_stage(self, report: StageFinished) -> None:
        attempt = report.rollout_id
        self.reports.setdefault(attempt, []).append(report)
        self.server.pop(attempt, None)
        if report.failure is not None or report.stage is Stage.EVAL:
            self.drop(attempt)
        else:
            self.held[attempt] = None

    def drop(self, attempt: str) -> list[StageFinished]:
        self.held.pop(attempt, None)
        self.server.pop(attempt, None)
        return self.reports.pop(attempt, [])

    def running(self, stage: Stage) -> int:
        return sum(s is stage for s in self.held.values())


class SchedulerMachine(RuleBasedStateMachine):
    switches: ClassVar[dict[str, Any]] = {}
    pools = POOLS

    def new_scheduler(self) -> Scheduler:
        return Scheduler(retries=2, report_grace_s=5.0, discard_again_s=10.0, **self.switches)

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = self.new_scheduler()
        self.specs: dict[str, RolloutSpec] = {}
        self.attempts: dict[str, int] = {}
        self.ended_before = 0
        self.now = 0.0
        self.worlds: dict[str, World] = {}
        self.versions: dict[str, int] = {}
        self.healthy: dict[str, bool] = {}
        self.newest = 0
        self.accepted: set[str] = set()
        self.ended: dict[str, Status] = {}
        self.old_reports: list[StageFinished] = []

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now):
            if isinstance(command, Ended):
                result = command.result
                assert result.rollout_id in self.accepted
                assert result.rollout_id not in self.ended, "ended twice"
                assert (result.reward is None) == (result.status is not Status.DONE)
                assert result.attempts <= 3
                self.ended[result.rollout_id] = result.status
            elif isinstance(command, Retried):
                self.attempts[command.rollout_id] = command.attempt
            else:
                self.obey(command)

    def obey(self, order: Order) -> None:
        world = self.worlds[order.worker_id]  # KeyError: an order to a worker that is not there
        message = order.message
        if isinstance(message, Discard):
            world.discards.append(message.rollout_id)
            return
        if isinstance(message, RequestServers):
            world.choice = [server.server_id for server in message.servers]
            return
        if isinstance(message, MoveRun):
            assert world.held[message.rollout_id] is Stage.RUN
            if message.server is not None:
                server_id = message.server.server_id
                assert self.healthy[server_id] and self.versions[server_id] == self.newest
                world.server[message.rollout_id] = server_id
            return
        attempt = message.spec.rollout_id if isinstance(message, StartInit) else message.rollout_id
        assert message.budget_s > 0
        if isinstance(message, StartInit):
            assert attempt not in world.held, "an attempt was started twice"
        else:
            assert world.held[attempt] is None, "a stage was started while another runs, or nowhere"
        if isinstance(message, StartRun):
            server_id = message.server.server_id
            assert self.healthy[server_id] and self.versions[server_id] == self.newest
            world.server[attempt] = server_id
        world.held[attempt] = STAGE_OF[type(message)]

    # rules

    @initialize(server=st.booleans())
    def something_is_there(self, server: bool) -> None:
        self.worker_starts("w0")
        if server:
            self.server_reports("s0", True, False, False)

    @rule(priority=st.sampled_from([10, 50]), group=st.integers(0, 3), count=st.integers(1, 8))
    def submit(self, priority: int, group: int, count: int) -> None:
        specs = tuple(
            RolloutSpec(
                f"r{len(self.accepted) + i}", "t", {}, group_id=f"g{group}" if group else "", priority=priority,
                budgets=Budgets(init_s=10, run_s=10, eval_s=10, total_s=25, wall_s=200),
            )
            for i in range(count)
        )  # fmt: skip
        self.accepted.update(s.rollout_id for s in specs)
        self.specs.update({s.rollout_id: s for s in specs})
        self.tell(Submit(specs))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.tell(Cancel((data.draw(st.sampled_from(sorted(self.accepted))), "unknown")))

    @rule(worker=st.sampled_from(WORKERS))
    def worker_starts(self, worker: str) -> None:
        if worker not in self.worlds:
            self.worlds[worker] = World()
            self.tell(WorkerJoined(worker, self.pools))

    @precondition(lambda self: self.worlds)
    @rule(data=st.data())
    def worker_says_hello_again(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.worlds)))
        self.tell(WorkerJoined(worker, self.pools, self.worlds[worker].hello()))

    @precondition(lambda self: self.worlds)
    @rule(data=st.data())
    def worker_is_started_anew_unnoticed(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.worlds)))
        self.worlds[worker] = World()
        self.tell(WorkerJoined(worker, self.pools))

    @precondition(lambda self: self.worlds)
    @rule(data=st.data(), comes_back=st.booleans())
    def worker_is_lost(self, data: st.DataObject, comes_back: bool) -> None:
        """If it comes back it was only silent, and still holds everything."""
        worker = data.draw(st.sampled_from(sorted(self.worlds)))
        world = self.worlds.pop(worker)
        self.tell(WorkerLost(worker, "silent"))
        if comes_back:
            world.discards.clear()
            self.worlds[worker] = world
            self.tell(WorkerJoined(worker, self.pools, world.hello()))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), reports=st.integers(0, 2), orders=st.integers(0, 2))
    def a_line_is_cut(self, data: st.DataObject, reports: int, orders: int) -> None:
        """Reports and orders that were on their way are lost."""
        worker = data.draw(st.sampled_from(sorted(self.worlds)))
        world = self.worlds[worker]
        mine = [(a, s) for w, a, s in self.running() if w == worker]
        for attempt, stage in mine[:reports]:
            report = StageFinished(worker, attempt, stage, reward=1.0, busy_s=1.0)
            world.end_stage(report)
            if attempt not in world.held:
                world.finals[attempt] = [report]
        for attempt, stage in mine[reports : reports + orders]:
            if stage is Stage.INIT:
                world.drop(attempt)
            else:
                world.held[attempt] = None
                world.server.pop(attempt, None)
        self.tell(WorkerJoined(worker, self.pools, world.hello()))

    @rule(data=st.data(), silent_ends=st.integers(0, 4), servers_first=st.booleans(), notes_lost=st.booleans())
    def the_coordinator_is_started_anew(
        self, data: st.DataObject, silent_ends: int, servers_first: bool, notes_lost: bool
    ) -> None:
        """Stages end while it is away; workers come back one by one, some after the grace, some not at all."""
        self.scheduler = self.new_scheduler()
        self.scheduler.servers.require("policy", self.newest)
        self.ended_before = len(self.ended)
        self.old_reports.clear()
        for world in self.worlds.values():
            world.discards.clear()
        for worker, attempt, stage in self.running()[:silent_ends]:
            failure = Failure(stage, FailureKind.SANDBOX, "broke") if data.draw(st.booleans()) else None
            world = self.worlds[worker]
            report = StageFinished(worker, attempt, stage, failure, reward=1.0, busy_s=1.0)
            world.end_stage(report)
            if attempt not in world.held:
                world.finals[attempt] = [report]
        live = [spec for name, spec in self.specs.items() if name not in self.ended]
        known = {} if notes_lost else self.attempts
        self.tell(Recover(tuple(Unfinished(spec, known.get(spec.rollout_id, 1)) for spec in live), grace_s=3.0))
        if servers_first:
            self.servers_say_hello()
        worlds, self.worlds = self.worlds, {}
        for worker in data.draw(st.permutations(sorted(worlds))):
            if data.draw(st.sampled_from([True, True, False])):
                if data.draw(st.booleans()):
                    self.now += 1.0
                    self.tell(Tick())
                self.worlds[worker] = worlds[worker]
                self.tell(WorkerJoined(worker, self.pools, worlds[worker].hello()))
        self.servers_say_hello()

    def servers_say_hello(self) -> None:
        for server, version in self.versions.items():
            self.tell(ServerSeen(ref(server), version, self.healthy[server]))

    @rule(on=st.booleans())
    def pause(self, on: bool) -> None:
        self.tell(Pause(on))

    @rule(holder=st.sampled_from("ab"), for_s=st.sampled_from([0.0, 5.0]))
    def hold(self, holder: str, for_s: float) -> None:
        self.tell(Hold(holder, for_s))

    @rule(worker=st.sampled_from(WORKERS), server=st.sampled_from(SERVERS), on=st.booleans())
    def drain(self, worker: str, server: str, on: bool) -> None:
        self.tell(WorkerDrains(worker, on))
        self.tell(ServerDrains(server, on))

    @precondition(lambda self: any(world.server for world in self.worlds.values()))
    @rule(data=st.data())
    def a_server_does_not_answer(self, data: st.DataObject) -> None:
        asked = [(w, a, s) for w, world in sorted(self.worlds.items()) for a, s in sorted(world.server.items())]
        worker, attempt, server = data.draw(st.sampled_from(asked))
        self.tell(ServerTrouble(worker, attempt, server, "silent"))

    @rule(server=st.sampled_from(SERVERS), healthy=st.booleans(), update=st.booleans(), restart=st.booleans())
    def server_reports(self, server: str, healthy: bool, update: bool, restart: bool) -> None:
        version = 0 if restart else self.versions.get(server, 0)
        if update:
            version = max(version + 1, self.newest)
        self.versions[server], self.healthy[server] = version, healthy
        self.newest = max(self.newest, version)
        self.tell(ServerSeen(ref(server), version, healthy))

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def server_is_lost(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(sorted(self.versions)))
        del self.versions[server], self.healthy[server]
        self.tell(ServerLost(server, "silent"))

    def running(self) -> list[tuple[str, str, Stage]]:
        return [(w, a, s) for w, world in sorted(self.worlds.items()) for a, s in world.held.items() if s is not None]

    def report(self, worker: str, attempt: str, stage: Stage, failure: Failure | None, timed_out: bool = False) -> None:
        world = self.worlds[worker]
        message = StageFinished(worker, attempt, stage, failure, timed_out, reward=1.0, busy_s=1.0)
        self.old_reports.append(message)
        world.end_stage(message)
        self.tell(message)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), kind=st.sampled_from([None, None, None, *FailureKind]), timed_out=st.booleans())
    def stage_ends(self, data: st.DataObject, kind: FailureKind | None, timed_out: bool) -> None:
        worker, attempt, stage = data.draw(st.sampled_from(self.running()))
        failure = None if kind is None else Failure(stage, kind, "broke")
        self.report(worker, attempt, stage, failure, timed_out and failure is not None)

    @precondition(lambda self: self.running())
    @rule(count=st.integers(1, 10), stages=st.sampled_from([list(Stage), [Stage.INIT], [Stage.INIT, Stage.RUN]]))
    def work_goes_on(self, count: int, stages: list[Stage]) -> None:
        for _ in range(count):
            running = [found for found in self.running() if found[2] in stages]
            if running:
                self.report(*running[0], None)

    @precondition(lambda self: self.old_reports)
    @rule(data=st.data())
    def an_old_report_comes_again(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.sampled_from(self.old_reports)))

    @precondition(lambda self: any(w.discards for w in self.worlds.values()))
    @rule(data=st.data())
    def discard_is_answered(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(w for w, world in self.worlds.items() if world.discards)))
        attempt = self.worlds[worker].discards.pop(0)
        self.worlds[worker].drop(attempt)
        self.tell(Discarded(worker, attempt))

    @precondition(lambda self: any(w.discards for w in self.worlds.values()))
    @rule(data=st.data())
    def discard_gets_lost(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(w for w, world in self.worlds.items() if world.discards)))
        self.worlds[worker].discards.pop(0)

    @rule(seconds=st.sampled_from([0.5, 6.0, 30.0, 90.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    # what must hold

    @invariant()
    def no_pool_is_over_its_size(self) -> None:
        for world in self.worlds.values():
            assert world.running(Stage.INIT) <= self.pools.init
            assert world.running(Stage.RUN) <= self.pools.run
            assert world.running(Stage.EVAL) <= self.pools.eval

    @invariant()
    def every_sandbox_is_accounted_for(self) -> None:
        for worker, world in self.worlds.items():
            assert set(world.held) <= set(self.scheduler.workers[worker])

    @invariant()
    def servers_have_what_runs_on_them(self) -> None:
        for server in SERVERS:
            assigned = self.scheduler.servers.assigned(server)
            assert assigned >= 0
            current = [
                a
                for w, world in self.worlds.items()
                for a, s in world.server.items()
                if s == server and a not in self.scheduler.workers[w].leaving
            ]
            # What was adopted may run on a server that is gone: its worker finds out.
            assert assigned == len(current) or (server not in self.versions and assigned == 0)

    @invariant()
    def counts_agree(self) -> None:
        counts = self.scheduler.counts
        assert all(n >= 0 for n in counts.values())
        assert sum(n for s, n in counts.items() if s.terminal) == len(self.ended) - self.ended_before
        assert sum(n for s, n in counts.items() if not s.terminal) == len(self.accepted) - len(self.ended)

    def teardown(self) -> None:
        """With workers and servers there, everything ends, and nothing is left anywhere."""
        self.pause(False)
        for worker, server in zip(WORKERS, (*SERVERS, "none"), strict=True):
            self.drain(worker, server, False)
        self.worker_starts("w0")
        self.server_reports("s0", True, True, False)
        lives = [life for r in self.accepted if (life := self.scheduler.life(r)) is not None]
        in_time = {life.spec.rollout_id for life in lives if life.wall_end > self.now + 100}
        for _ in range(2000):
            self.now += 0.05
            if self.running():
                self.report(*self.running()[0], None)
            for worker, world in self.worlds.items():
                for attempt in world.discards:
                    world.drop(attempt)
                    self.tell(Discarded(worker, attempt))
                world.discards.clear()
            self.tell(Tick())
            if set(self.ended) == self.accepted and not any(len(w) for w in self.scheduler.workers.values()):
                break
        assert all(self.ended[r] is Status.DONE for r in in_time), "the wall cap had to end what should have run"
        assert set(self.ended) == self.accepted
        for worker, world in self.worlds.items():
            assert not world.held
            assert len(self.scheduler.workers[worker]) == 0
        assert self.scheduler.live == 0


class WithoutCleanUpOrBuffer(SchedulerMachine):
    """What is cancelled in RUN goes on, and no sandbox is prepared before there is a RUN slot for it."""

    switches: ClassVar[dict[str, Any]] = {"abort_cancelled": False}
    pools = Pools(init=2, ready=0, run=2, eval=1)

    @invariant()
    def a_run_slot_waits_for_every_sandbox_that_is_prepared(self) -> None:
        for world in self.worlds.values():
            reports = world.reports
            before_eval = [a for a, stage in world.held.items() if stage is not Stage.EVAL]
            ran = [a for a in before_eval if any(report.stage is Stage.RUN for report in reports.get(a, []))]
            assert len(before_eval) - len(ran) <= self.pools.run


class WithAServerForEachRequest(SchedulerMachine):
    """Assignments are in name only, and no worker is told to move because of them."""

    switches: ClassVar[dict[str, Any]] = {"balancing": PER_REQUEST}

    @invariant()
    def servers_have_what_runs_on_them(self) -> None:
        runs = [a for w, a, stage in self.running() if stage is Stage.RUN]
        assert sum(self.scheduler.servers.assigned(server) for server in SERVERS) <= len(runs)

    @invariant()
    def every_worker_knows_the_servers_that_requests_may_go_to(self) -> None:
        servers = [server.server_id for server in self.scheduler.servers.eligible]
        assert all(world.choice == servers for world in self.worlds.values())


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


SchedulerMachine.TestCase.settings = _settings(300)
WithoutCleanUpOrBuffer.TestCase.settings = WithAServerForEachRequest.TestCase.settings = _settings(60)
TestSchedulerMachine = SchedulerMachine.TestCase
TestWithoutCleanUpOrBuffer = WithoutCleanUpOrBuffer.TestCase
TestWithAServerForEachRequest = WithAServerForEachRequest.TestCase
