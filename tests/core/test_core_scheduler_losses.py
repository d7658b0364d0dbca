"""What the scheduler makes of lost servers, of a restart, and of a rollout that takes too long."""

from __future__ import annotations

from scheduler_bench import TRAJECTORY, Bench

from prorl_hpc.core.events import (
    Cancel,
    Recover,
    Retried,
    ServerLost,
    Tick,
    Unfinished,
    WorkerLost,
)
from prorl_hpc.messages.control import (
    Discarded,
    Held,
    ServerRef,
    ServerTrouble,
    StageFinished,
)
from prorl_hpc.messages.rollout import Budgets, Failure, FailureKind, RolloutSpec, Stage, Status

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
    left = tuple(Unfinished(RolloutSpec(name, "t", {}), attempt) for name, attempt in rollouts)
    bench.tell(Recover(left, grace_s=5.0), at=9.0)
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
