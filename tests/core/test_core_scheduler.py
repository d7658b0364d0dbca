"""The scheduler case by case; what holds under any order of events is in test_core_scheduler_machine.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

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
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    MoveRun,
    Pools,
    ServerRef,
    ServerTrouble,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Budgets, Failure, FailureKind, RolloutResult, RolloutSpec, Stage, Status
from prorl_hpc.messages.trajectory import Segment, Trajectory

TRAJECTORY = msgspec.msgpack.encode(Trajectory([Segment([1, 2, 3])]))


class Bench:
    """A scheduler and everything it has said."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = Scheduler(**settings)
        self.now = 0.0
        self.said: list[Command] = []

    def tell(self, event: Event, at: float | None = None) -> list[Command]:
        self.now = at if at is not None else self.now
        commands = self.scheduler.handle(event, self.now)
        self.said += commands
        return commands

    def worker(self, worker_id: str = "w", pools: Pools | None = None, held: tuple[Held, ...] = ()) -> list[Command]:
        return self.tell(WorkerJoined(worker_id, pools or Pools(2, 4, 4, 2), held))

    def server(self, server_id: str = "s", version: int = 0, *, healthy: bool = True, policy: str = "policy") -> None:
        self.tell(ServerSeen(ServerRef(server_id, "n", "ipc://x", "", policy), version, healthy))

    def submit(self, *names: str, **fields: Any) -> list[Command]:
        return self.tell(Submit(tuple(RolloutSpec(name, "t", {"id": name}, **fields) for name in names)))

    def ends(self, name: str, stage: Stage, worker: str = "w", **fields: Any) -> list[Command]:
        if stage is Stage.EVAL and "failure" not in fields:
            fields.setdefault("reward", 1.0)
        if stage is Stage.RUN:
            fields.setdefault("trajectory", TRAJECTORY)
        return self.tell(StageFinished(worker, name, stage, **fields))

    def breaks(self, name: str, stage: Stage, kind: FailureKind, worker: str = "w", **fields: Any) -> list[Command]:
        return self.ends(name, stage, worker, failure=Failure(stage, kind, "broke"), **fields)

    @property
    def started(self) -> list[tuple[str, str, str]]:
        """(stage, attempt, worker) of every stage that was started."""
        found = []
        for command in self.said:
            if isinstance(command, Order):
                message = command.message
                if isinstance(message, StartInit):
                    found.append(("init", message.spec.rollout_id, command.worker_id))
                elif isinstance(message, StartRun | StartEval):
                    found.append((type(message).__name__[5:].lower(), message.rollout_id, command.worker_id))
        return found

    @property
    def discarded(self) -> list[tuple[str, str]]:
        orders = [c for c in self.said if isinstance(c, Order) and isinstance(c.message, Discard)]
        return [(o.worker_id, o.message.rollout_id) for o in orders]  # type: ignore[union-attr]

    @property
    def results(self) -> dict[str, RolloutResult]:
        return {c.result.rollout_id: c.result for c in self.said if isinstance(c, Ended)}

    @property
    def trajectories(self) -> dict[str, bytes | None]:
        return {c.result.rollout_id: c.trajectory for c in self.said if isinstance(c, Ended)}

    @property
    def moved(self) -> list[tuple[str, str | None]]:
        orders = [c.message for c in self.said if isinstance(c, Order) and isinstance(c.message, MoveRun)]
        return [(order.rollout_id, order.server.server_id if order.server else None) for order in orders]


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.worker()
    made.server()
    return made


def test_a_life_from_end_to_end(bench: Bench) -> None:
    bench.submit("a", group_id="g", sample=3)
    bench.now = 1.0
    bench.ends("a", Stage.INIT, busy_s=0.5)
    bench.now = 3.0
    bench.ends("a", Stage.RUN, busy_s=1.5)
    bench.ends("a", Stage.EVAL, reward=0.25, metrics={"turns": 2.0})
    assert bench.started == [("init", "a", "w"), ("run", "a", "w"), ("eval", "a", "w")]
    result = bench.results["a"]
    assert (result.status, result.reward, result.metrics) == (Status.DONE, 0.25, {"turns": 2.0})
    assert (result.worker, result.server, result.row_id, result.attempts) == ("w", "s", "a", 1)
    assert (result.group_id, result.sample, bench.trajectories["a"]) == ("g", 3, TRAJECTORY)
    assert [(t.stage, t.busy_s) for t in result.timings] == [(Stage.INIT, 0.5), (Stage.RUN, 1.5), (Stage.EVAL, 0.0)]
    assert len(bench.scheduler.workers["w"]) == 0


def test_inits_start_only_into_room_for_their_sandboxes() -> None:
    bench = Bench()
    bench.worker(pools=Pools(init=2, ready=3, run=1, eval=1))
    bench.submit("a", "b", "c", "d", "e")
    assert [s[1] for s in bench.started] == ["a", "b"]
    bench.ends("a", Stage.INIT)  # no server: it stays READY
    assert [s[1] for s in bench.started] == ["a", "b", "c"]
    bench.ends("b", Stage.INIT)
    bench.ends("c", Stage.INIT)
    assert len(bench.started) == 3
    bench.server()
    assert bench.started[3:] == [("run", "a", "w"), ("init", "d", "w")]


def test_a_slow_eval_holds_no_run_slot_but_sandboxes_do_not_pile_up_for_ever() -> None:
    bench = Bench()
    bench.worker(pools=Pools(init=1, ready=1, run=1, eval=1))
    bench.server()
    bench.submit(*(f"r{i}" for i in range(20)))
    for _ in range(100):
        for stage, name, _ in bench.started:
            life = bench.scheduler.life(name)
            if stage in ("init", "run") and life is not None and life.status.value == stage:
                bench.ends(name, Stage(stage))
    assert bench.scheduler.counts[Status.EVAL] == 1
    assert len(bench.scheduler.workers["w"]) == 4  # ready + 2 run + eval


def test_lower_priority_numbers_go_first_then_the_older_group_then_the_older_rollout() -> None:
    bench = Bench()
    bench.submit("old", group_id="g1")
    bench.submit("x", group_id="g2")
    bench.submit("late", group_id="g1")
    bench.submit("urgent", priority=1)
    bench.worker(pools=Pools(8, 8, 8, 8))
    assert [s[1] for s in bench.started] == ["urgent", "old", "late", "x"]


def test_work_is_spread_over_workers() -> None:
    bench = Bench()
    bench.worker("w1")
    bench.worker("w2")
    bench.submit("a", "b", "c", "d")
    assert sorted(s[2] for s in bench.started) == ["w1", "w1", "w2", "w2"]


@pytest.mark.parametrize("kind", list(FailureKind))
@pytest.mark.parametrize("stage", list(Stage))
def test_which_failures_are_retried(bench: Bench, stage: Stage, kind: FailureKind) -> None:
    bench.worker("v")
    bench.submit("a")
    first = bench.started[0][2]
    for before in list(Stage)[: list(Stage).index(stage)]:
        bench.ends("a", before, first)
    bench.breaks("a", stage, kind, first)
    if kind.retryable:
        assert "a" not in bench.results
        assert bench.started[-1] == ("init", "a#2", {"w": "v", "v": "w"}[first])
    else:
        result = bench.results["a"]
        assert (result.status, result.reward) == (Status.FAILED, None)
        assert result.failure == Failure(stage, kind, "broke")
        assert bench.trajectories["a"] == (None if stage is Stage.INIT else TRAJECTORY)


def test_retries_end(bench: Bench) -> None:
    bench.submit("a")
    for attempt in ("a", "a#2", "a#3"):
        assert bench.started[-1][1] == attempt
        bench.breaks(attempt, Stage.INIT, FailureKind.SANDBOX)
    assert (bench.results["a"].status, bench.results["a"].attempts) == (Status.FAILED, 3)


def test_a_retry_waits_for_another_worker_if_there_is_one() -> None:
    bench = Bench()
    small = Pools(1, 1, 1, 1)
    bench.worker("w1", small)
    bench.submit("a")
    bench.worker("w2", small)
    bench.submit("b")
    bench.breaks("a", Stage.INIT, FailureKind.SANDBOX, "w1")
    bench.submit("c")
    assert bench.started[-1] == ("init", "c", "w1")  # not held up by it
    bench.breaks("b", Stage.INIT, FailureKind.TASK, "w2")
    assert bench.started[-1] == ("init", "a#2", "w2")


def test_an_inference_failure_is_retried_on_another_server(bench: Bench) -> None:
    bench.submit("a")
    bench.server("s2")
    bench.ends("a", Stage.INIT)
    first = bench.scheduler.life("a").server  # type: ignore[union-attr]
    bench.breaks("a", Stage.RUN, FailureKind.INFERENCE)
    bench.ends("a#2", Stage.INIT)
    assert bench.scheduler.life("a").server == {"s": "s2", "s2": "s"}[first]  # type: ignore[union-attr]


def test_a_stage_that_used_up_its_budget() -> None:
    bench = Bench(retries=0)
    bench.worker()
    bench.submit("a", "b")
    bench.breaks("a", Stage.INIT, FailureKind.TASK, timed_out=True)
    bench.breaks("b", Stage.INIT, FailureKind.SANDBOX, timed_out=True)
    assert {r.status for r in bench.results.values()} == {Status.TIMED_OUT}
    assert bench.results["a"].failure.stage is Stage.INIT  # type: ignore[union-attr]


def test_budgets_count_stages_only_and_the_total_bounds_the_rest(bench: Bench) -> None:
    bench.submit("a", budgets=Budgets(init_s=60, run_s=300, eval_s=60, total_s=100, wall_s=10_000))
    bench.tell(StageFinished("w", "a", Stage.INIT, busy_s=20.0), at=20.0)
    run = next(c.message for c in bench.said if isinstance(c, Order) and isinstance(c.message, StartRun))
    assert run.budget_s == 80.0
    bench.tell(StageFinished("w", "a", Stage.RUN, busy_s=75.0), at=95.0)
    eval_ = next(c.message for c in bench.said if isinstance(c, Order) and isinstance(c.message, StartEval))
    assert eval_.budget_s == 5.0


def test_time_in_queues_does_not_count() -> None:
    bench = Bench()
    bench.submit("a", budgets=Budgets(total_s=100, wall_s=10_000))
    bench.now = 5000.0
    bench.worker()
    order = next(c.message for c in bench.said if isinstance(c, Order))
    assert isinstance(order, StartInit) and order.budget_s == 60.0
    bench.tell(StageFinished("w", "a", Stage.INIT, busy_s=2.0), at=5002.0)
    bench.now = 9000.0
    bench.server()
    assert bench.started[-1] == ("run", "a", "w")
    bench.ends("a", Stage.RUN)
    bench.ends("a", Stage.EVAL)
    assert [t.queued_s for t in bench.results["a"].timings] == [5000.0, 3998.0, 0.0]


def test_nothing_of_the_total_left_is_a_time_out(bench: Bench) -> None:
    bench.submit("a", budgets=Budgets(init_s=60, total_s=10))
    bench.tell(StageFinished("w", "a", Stage.INIT, busy_s=10.0), at=10.0)
    result = bench.results["a"]
    assert (result.status, result.failure.stage) == (Status.TIMED_OUT, Stage.RUN)  # type: ignore[union-attr]
    assert bench.discarded == [("w", "a")]


@pytest.mark.parametrize("placed", [True, False])
def test_the_wall_cap_counts_queues_too(placed: bool) -> None:
    bench = Bench()
    if placed:
        bench.worker()
    bench.submit("a", budgets=Budgets(init_s=90, wall_s=100))
    bench.tell(Tick(), at=99.0)
    assert not bench.results
    bench.tell(Tick(), at=100.0)
    assert bench.results["a"].status is Status.TIMED_OUT
    assert bench.discarded == ([("w", "a")] if placed else [])


def test_a_worker_that_does_not_report_is_not_waited_for(bench: Bench) -> None:
    bench.submit("a", budgets=Budgets(init_s=60))
    bench.worker("v")
    bench.tell(Tick(), at=74.0)
    assert len(bench.started) == 1
    bench.tell(Tick(), at=75.0)
    assert bench.discarded == [("w", "a")]
    assert bench.started[-1] == ("init", "a#2", "v")
    bench.ends("a", Stage.INIT)  # too late
    assert bench.scheduler.life("a").status is Status.INIT  # type: ignore[union-attr]


def test_cancel_frees_the_slot_when_the_worker_says_so(bench: Bench) -> None:
    bench.submit("a")
    bench.tell(Cancel(("a", "unknown")))
    assert bench.results["a"].status is Status.CANCELLED
    assert len(bench.scheduler.workers["w"]) == 1
    bench.tell(Discarded("w", "a"))
    assert len(bench.scheduler.workers["w"]) == 0


def test_an_unanswered_discard_is_said_again(bench: Bench) -> None:
    bench.submit("a")
    bench.tell(Cancel(("a",)), at=1.0)
    bench.tell(Tick(), at=10.0)
    assert len(bench.discarded) == 1
    bench.tell(Tick(), at=11.0)
    assert bench.discarded == [("w", "a")] * 2


def test_a_lost_workers_rollouts_go_elsewhere(bench: Bench) -> None:
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    bench.worker("v")
    bench.tell(WorkerLost("w", "silent"))
    assert bench.started[-1] == ("init", "a#2", "v")
    assert bench.scheduler.servers.assigned("s") == 0
    assert bench.discarded == []


def test_a_worker_that_comes_back_drops_what_it_held_before_it_gets_more(bench: Bench) -> None:
    bench.submit("a")
    bench.tell(WorkerLost("w", "silent"))
    bench.worker("w", held=(Held("a", running=Stage.INIT),))
    assert bench.discarded == [("w", "a")]
    assert len(bench.started) == 1
    bench.tell(Discarded("w", "a"))
    assert bench.started[-1] == ("init", "a#2", "w")


def test_a_hello_again_loses_nothing_that_is_held(bench: Bench) -> None:
    bench.submit("a", "b")
    bench.worker("w", held=(Held("a", running=Stage.INIT),))
    assert bench.discarded == [("w", "b")]
    bench.tell(Discarded("w", "b"))
    assert ("init", "b#2", "w") in bench.started
    bench.ends("a", Stage.INIT)
    assert bench.scheduler.life("a").status is Status.RUN  # type: ignore[union-attr]


def test_a_lost_servers_runs_start_again() -> None:
    bench = Bench(move_runs=False)
    bench.worker()
    bench.server()
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    bench.server("s2")
    bench.tell(ServerLost("s", "silent"))
    assert bench.discarded == [("w", "a")]
    assert bench.started[-1] == ("init", "a#2", "w")  # the worker is not to blame
    bench.ends("a#2", Stage.INIT)
    assert bench.scheduler.life("a").server == "s2"  # type: ignore[union-attr]


def test_rollouts_of_one_policy_do_not_wait_for_the_servers_of_another() -> None:
    bench = Bench()
    bench.worker()
    bench.server("s", policy="judge")
    bench.submit("a", policy="policy")
    bench.submit("b", policy="judge")
    assert bench.started == [("init", "b", "w")]  # no sandbox is held for a policy that nobody serves
    bench.server("p", policy="policy")
    assert bench.started[-1] == ("init", "a", "w")
    bench.tell(ServerLost("p", "silent"))
    bench.ends("a", Stage.INIT)
    bench.ends("b", Stage.INIT)
    assert [s for s in bench.started if s[0] == "run"] == [("run", "b", "w")]
    bench.server("p", policy="policy")
    assert bench.started[-1] == ("run", "a", "w")


def test_done_without_a_reward_is_a_failure_of_the_task(bench: Bench) -> None:
    bench.submit("a")
    for stage in Stage:
        bench.ends("a", stage, reward=None)
    result = bench.results["a"]
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert result.failure.kind is FailureKind.TASK  # type: ignore[union-attr]


# clients, pauses, drains


def test_clients_of_one_priority_get_equal_shares() -> None:
    bench = Bench()
    bench.submit(*(f"a{i}" for i in range(6)), client="a")
    bench.submit(*(f"b{i}" for i in range(3)), client="b")
    bench.submit("c", client="c", priority=10)
    bench.worker(pools=Pools(init=9, ready=9, run=1, eval=1))
    assert [name for _, name, _ in bench.started] == ["c", "a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_client_that_was_idle_gains_no_lead() -> None:
    bench = Bench()
    bench.submit(*(f"a{i}" for i in range(4)), client="a")
    bench.worker(pools=Pools(init=4, ready=4, run=1, eval=1))
    bench.submit("a4", "a5", client="a")
    bench.submit("b0", "b1", client="b")
    for i in range(4):
        bench.breaks(f"a{i}", Stage.INIT, FailureKind.TASK)
    assert [name for _, name, _ in bench.started[4:]] == ["b0", "a4", "b1", "a5"]


def test_a_pause_starts_nothing_and_stops_nothing(bench: Bench) -> None:
    bench.submit("a")
    bench.tell(Pause(True))
    bench.submit("b")
    bench.ends("a", Stage.INIT)
    assert bench.started == [("init", "a", "w"), ("run", "a", "w")]
    bench.tell(Pause(False))
    assert bench.started[-1] == ("init", "b", "w")


def test_a_draining_worker_finishes_what_it_has(bench: Bench) -> None:
    bench.submit("a")
    bench.tell(WorkerDrains("w", True))
    bench.submit("b")
    for stage in Stage:
        bench.ends("a", stage)
    assert bench.results["a"].status is Status.DONE
    assert ("init", "b", "w") not in bench.started
    bench.tell(WorkerDrains("w", False))
    assert bench.started[-1] == ("init", "b", "w")


def test_a_draining_server_gets_no_more_and_keeps_what_it_has(bench: Bench) -> None:
    bench.submit("a", "b")
    bench.ends("a", Stage.INIT)
    bench.tell(ServerDrains("s", True))
    bench.ends("b", Stage.INIT)
    assert (bench.scheduler.servers.assigned("s"), bench.started.count(("run", "b", "w"))) == (1, 0)
    bench.server("s2")
    assert bench.scheduler.life("b").server == "s2"  # type: ignore[union-attr]


def test_a_coupled_pool_holds_one_slot_from_init_to_the_end_of_eval() -> None:
    bench = Bench()
    bench.worker(pools=Pools(init=1, ready=1, run=2, eval=1, coupled=True))
    bench.server()
    bench.submit("a", "b", "c")
    assert [name for _, name, _ in bench.started] == ["a", "b"]
    for name in "ab":
        bench.ends(name, Stage.INIT)
        bench.ends(name, Stage.RUN)
    assert len(bench.started) == 6
    bench.ends("a", Stage.EVAL)
    assert bench.started[-1] == ("init", "c", "w")


# moving


def test_a_lost_servers_runs_move_on(bench: Bench) -> None:
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    bench.server("s2")
    bench.tell(ServerLost("s", "silent"))
    assert (bench.moved, bench.discarded) == ([("a", "s2")], [])
    assert bench.scheduler.servers.assigned("s2") == 1
    bench.tell(ServerTrouble("w", "a", "s", "no answer"))  # the worker noticed too
    assert bench.moved == [("a", "s2")]
    bench.ends("a", Stage.RUN)
    bench.ends("a", Stage.EVAL)
    assert (bench.results["a"].server, bench.results["a"].attempts) == ("s2", 1)


def test_a_server_that_does_not_answer_one_rollout_is_left_by_it(bench: Bench) -> None:
    bench.server("s2")
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    first = bench.scheduler.life("a").server  # type: ignore[union-attr]
    other = {"s": "s2", "s2": "s"}[first]
    bench.tell(ServerTrouble("w", "a", first, "no answer"))
    assert bench.moved == [("a", other)]
    bench.tell(ServerTrouble("w", "a", other, "no answer"))
    assert bench.moved[-1] == ("a", None)
    bench.breaks("a", Stage.RUN, FailureKind.INFERENCE)
    assert bench.scheduler.life("a").attempt == 2  # type: ignore[union-attr]
    assert bench.scheduler.servers.assigned("s") + bench.scheduler.servers.assigned("s2") == 0


def test_without_moving_a_troubled_run_fails_on_its_worker() -> None:
    bench = Bench(move_runs=False)
    bench.worker()
    bench.server()
    bench.server("s2")
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    bench.tell(ServerTrouble("w", "a", bench.scheduler.life("a").server, "no answer"))  # type: ignore[union-attr]
    assert bench.moved == [("a", None)]


# after a restart


def reports(*stages: Stage, worker: str = "w", attempt: str = "a") -> list[StageFinished]:
    return [
        StageFinished(worker, attempt, stage, trajectory=TRAJECTORY if stage is Stage.RUN else None,
                      reward=1.0 if stage is Stage.EVAL else None, busy_s=2.0)
        for stage in stages
    ]  # fmt: skip


def recovered(*rollouts: tuple[str, int]) -> Bench:
    bench = Bench()
    bench.tell(Recover(tuple((RolloutSpec(name, "t", {}), attempt) for name, attempt in rollouts), grace_s=5.0), at=9.0)
    return bench


REF = ServerRef("s", "n", "ipc://x", "")


def test_what_a_worker_still_holds_goes_on_where_it_is() -> None:
    bench = recovered(("a", 1), ("b", 1), ("c", 1), ("d", 2))
    held = (
        Held("a", reports(Stage.INIT), Stage.RUN, REF),
        Held("b", reports(Stage.INIT, Stage.RUN, attempt="b")),
        Held("c", reports(Stage.INIT, Stage.RUN, Stage.EVAL, attempt="c")),
        Held("d", reports(Stage.INIT, attempt="d")),  # of an attempt before the one that is known
        Held("d#2", running=Stage.INIT),
    )
    bench.worker(held=held)
    assert bench.discarded == [("w", "d")]
    assert bench.results["c"].status is Status.DONE
    assert bench.trajectories["c"] == TRAJECTORY
    assert [t.busy_s for t in bench.results["c"].timings] == [2.0, 2.0, 2.0]
    assert bench.scheduler.servers.assigned("s") == 1
    bench.tell(Discarded("w", "d"))
    assert bench.started == [("eval", "b", "w")]
    bench.server()
    bench.ends("a", Stage.RUN)
    bench.ends("a", Stage.EVAL)
    bench.tell(Tick(), at=20.0)
    assert (bench.results["a"].attempts, bench.results["a"].server) == (1, "s")
    assert bench.scheduler.servers.assigned("s") == 0
    bench.ends("d#2", Stage.INIT)
    assert bench.scheduler.life("d").status is Status.RUN  # type: ignore[union-attr]


def test_what_nobody_holds_starts_after_the_grace() -> None:
    bench = recovered(("a", 1), ("b", 3))
    bench.worker()
    bench.tell(Tick(), at=13.9)
    assert bench.started == []
    bench.submit("new")
    assert bench.started == [("init", "new", "w")]
    bench.tell(Tick(), at=14.0)
    assert bench.started[1:] == [("init", "a", "w")]
    bench.ends("new", Stage.INIT)
    assert bench.started[-1] == ("init", "b#3", "w")


def test_a_worker_that_comes_after_the_grace_is_still_welcome_with_what_waits() -> None:
    bench = recovered(("a", 1))
    bench.tell(Tick(), at=20.0)
    bench.worker(held=(Held("a", reports(Stage.INIT)),))
    assert (bench.started, bench.discarded) == ([], [])
    bench.server()
    assert bench.started == [("run", "a", "w")]


def test_a_rollout_that_two_workers_hold_goes_on_at_one() -> None:
    bench = recovered(("a", 1))
    bench.worker("w", held=(Held("a", reports(Stage.INIT)),))
    bench.worker("v", held=(Held("a#2", running=Stage.INIT),))
    assert bench.discarded == [("v", "a#2")]
    bench.tell(StageFinished("v", "a#2", Stage.INIT))
    bench.tell(Cancel(("a",)))
    assert bench.results["a"].status is Status.CANCELLED


def test_a_failure_that_was_not_told_before_is_retried(bench: Bench) -> None:
    bench = recovered(("a", 1))
    failed = StageFinished("w", "a", Stage.INIT, Failure(Stage.INIT, FailureKind.SANDBOX, "broke"), busy_s=1.0)
    said = bench.worker(held=(Held("a", [failed]),))
    assert Retried("a", 2) in said
    assert bench.started == [("init", "a#2", "w")]


def test_an_orphan_can_be_cancelled_and_hits_the_wall() -> None:
    bench = recovered(("a", 1), ("b", 1))
    bench.tell(Cancel(("a",)))
    bench.tell(Tick(), at=9.0 + 3600)
    assert {n: r.status for n, r in bench.results.items()} == {"a": Status.CANCELLED, "b": Status.TIMED_OUT}


# the wall, with what was generated


def at_the_wall(bench: Bench) -> None:
    bench.submit("a", budgets=Budgets(run_s=1000, total_s=1000, wall_s=100))
    bench.ends("a", Stage.INIT)
    bench.tell(Tick(), at=100.0)
    assert bench.discarded == [("w", "a")]
    assert "a" not in bench.results


def test_a_run_at_the_wall_gives_its_trajectory(bench: Bench) -> None:
    at_the_wall(bench)
    bench.tell(Discarded("w", "a", TRAJECTORY))
    assert (bench.results["a"].status, bench.trajectories["a"]) == (Status.TIMED_OUT, TRAJECTORY)


def test_a_trajectory_is_not_waited_for_for_ever(bench: Bench) -> None:
    at_the_wall(bench)
    bench.tell(Tick(), at=110.0)
    assert (bench.results["a"].status, bench.trajectories["a"]) == (Status.TIMED_OUT, None)


def test_a_worker_that_is_lost_takes_its_trajectories_along(bench: Bench) -> None:
    at_the_wall(bench)
    bench.tell(WorkerLost("w", "silent"))
    assert bench.results["a"].status is Status.TIMED_OUT
