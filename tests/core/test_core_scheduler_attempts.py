"""What the scheduler does at the end of an attempt of the run, and at the beginning of the next."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from prorl_hpc.core.events import Cancel, Drain, Pause, Recover, Retried, ServerLost, Tick, Unfinished, Wake, WorkerLost
from prorl_hpc.messages.control import Held, Pools, StageFinished
from prorl_hpc.messages.rollout import Budgets, FailureKind, RolloutSpec, Stage, Status

LEFT = "it left"


@pytest.fixture
def bench() -> Bench:
    made = Bench(retries=1)
    made.worker()
    made.server()
    return made


def test_a_drain_starts_no_rollout_and_lets_those_end_that_are_under_way(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    bench.ends("a", Stage.INIT)
    assert [stage for stage, _, _ in bench.started] == ["init", "init", "run", "init"]
    bench.tell(Drain())
    bench.submit("late")
    bench.tell(Pause(False))
    assert bench.scheduler.draining and bench.scheduler.under_way == 3
    for name in "abc":
        for stage in (Stage.INIT, Stage.RUN, Stage.EVAL)[name == "a" :]:
            bench.ends(name, stage)
    assert bench.scheduler.under_way == 0
    assert {r.status for r in bench.results.values()} == {Status.DONE} and len(bench.results) == 3
    assert ("init", "late", "w") not in bench.started and bench.scheduler.life("late") is not None


def test_what_breaks_while_draining_is_left_to_the_next_attempt(bench: Bench) -> None:
    bench.submit("a", "b")
    bench.breaks("a", Stage.INIT, FailureKind.SANDBOX)  # its only retry
    bench.tell(Drain())
    said = bench.breaks("a#2", Stage.INIT, FailureKind.INFRASTRUCTURE) + bench.breaks("b", Stage.INIT, FailureKind.TASK)
    assert Retried("a", 3, 1) in said
    assert list(bench.results) == ["b"], "what is the task's own fault ends as ever"
    assert bench.scheduler.under_way == 0


def test_a_rollout_that_no_server_would_run_is_not_waited_for(bench: Bench) -> None:
    bench.submit("a")
    bench.server(healthy=False)
    bench.ends("a", Stage.INIT)
    bench.tell(Drain())
    assert bench.scheduler.under_way == 0
    bench.server()
    assert bench.scheduler.under_way == 1


@pytest.mark.parametrize("left", [True, False])
def test_a_worker_that_was_told_to_go_costs_no_retry(left: bool) -> None:
    bench = Bench(retries=0)
    bench.worker()
    bench.submit("a")
    bench.tell(WorkerLost("w", LEFT, left))
    assert ("a" in bench.results) is not left
    if left:
        bench.worker()
        bench.server()
        for stage in (Stage.INIT, Stage.RUN, Stage.EVAL):
            bench.ends("a#2", stage)
        assert (bench.results["a"].status, bench.results["a"].attempts) == (Status.DONE, 1)


def test_a_server_that_was_told_to_go_costs_no_retry() -> None:
    bench = Bench(retries=0, move_runs=False)
    bench.worker()
    bench.server()
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    bench.tell(ServerLost("s", LEFT, left=True))
    assert bench.scheduler.life("a").attempt_id == "a#2"  # type: ignore[union-attr]


def cut(*left: Unfinished) -> Bench:
    """The next attempt of a run: nobody holds anything."""
    bench = Bench(retries=1)
    bench.tell(Recover(left, grace_s=0.0), at=50.0)
    return bench


def spec(name: str, **fields: object) -> RolloutSpec:
    return RolloutSpec(name, "t", {}, **fields)  # type: ignore[arg-type]


def test_without_grace_all_starts_at_once_and_stale_reports_are_refused() -> None:
    bench = cut(Unfinished(spec("a"), 2, 1))
    bench.worker(held=(Held("a", running=Stage.RUN),))  # a worker of the attempt before
    assert ("w", "a") in bench.discarded
    bench.worker("v")
    assert bench.started == [("init", "a#2", "v")]
    bench.server()
    bench.tell(StageFinished("v", "a", Stage.INIT))
    assert bench.scheduler.life("a").status is Status.INIT  # type: ignore[union-attr]


def test_retries_within_the_attempt_still_end() -> None:
    bench = cut(Unfinished(spec("a"), 21, 20))
    bench.worker()
    bench.breaks("a#21", Stage.INIT, FailureKind.SANDBOX)
    assert "a" not in bench.results
    bench.breaks("a#22", Stage.INIT, FailureKind.SANDBOX)
    assert (bench.results["a"].status, bench.results["a"].attempts) == (Status.FAILED, 2)


def test_a_sleeper_starts_when_it_is_woken_and_its_wall_stands_still_until_then() -> None:
    walled = Budgets(wall_s=10.0)
    bench = cut(
        Unfinished(spec("a", budgets=walled), asleep=True), Unfinished(spec("b"), asleep=True), Unfinished(spec("c"))
    )
    bench.worker()
    bench.tell(Tick(), at=70.0)
    assert bench.started == [("init", "c", "w")] and bench.scheduler.live == 3
    bench.tell(Cancel(("b",)))
    bench.tell(Wake(("a", "b", "c", "unknown")))
    assert bench.started == [("init", "c", "w"), ("init", "a", "w")]
    assert bench.results["b"].status is Status.CANCELLED
    bench.tell(Tick(), at=79.0)
    assert bench.scheduler.life("a") is not None
    bench.tell(Tick(), at=80.0)
    assert bench.results["a"].status is Status.TIMED_OUT


def test_a_sleeper_that_a_worker_holds_is_awake() -> None:
    """The coordinator was started again within the attempt, and forgot that somebody had asked for it."""
    bench = Bench()
    bench.tell(Recover((Unfinished(spec("a", budgets=Budgets(wall_s=10.0)), 2, asleep=True),), grace_s=3.0))
    bench.worker(held=(Held("a#2", running=Stage.INIT),), pools=Pools(1, 1, 1, 1))
    assert bench.scheduler.life("a").status is Status.INIT  # type: ignore[union-attr]
    bench.tell(Wake(("a",)))
    bench.tell(Tick(), at=10.0)
    assert bench.results["a"].status is Status.TIMED_OUT
