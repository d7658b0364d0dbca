"""The scheduler case by case; what holds under any order of events is in test_core_scheduler_machine.py."""

from __future__ import annotations

import pytest
from scheduler_bench import TRAJECTORY, Bench

from prorl_hpc.core.events import (
    Cancel,
    Hold,
    Order,
    Pause,
    ServerDrains,
    ServerLost,
    Tick,
    WorkerDrains,
    WorkerLost,
)
from prorl_hpc.messages.control import (
    Discarded,
    Held,
    Pools,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Budgets, Failure, FailureKind, Stage, Status


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


def test_a_hold_is_over_when_its_time_is_and_ends_nobody_elses(bench: Bench) -> None:
    for event in (Hold("a", 10.0), Hold("b", 30.0), Pause(True)):
        bench.tell(event)
    bench.submit("x")
    bench.tell(Pause(False))
    assert bench.scheduler.holds(bench.now) == {"a": 10.0, "b": 30.0}
    bench.tell(Hold("b", 0.0))
    assert not bench.started
    bench.tell(Hold("a", 15.0))
    bench.now += 12.0
    bench.tell(Tick())
    assert not bench.started and bench.scheduler.holds(bench.now) == {"a": 3.0}
    bench.now += 3.0
    assert bench.scheduler.holds(bench.now) == {}
    bench.tell(Tick())
    assert bench.started == [("init", "x", "w")]


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
