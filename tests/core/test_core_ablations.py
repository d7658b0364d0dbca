"""What the scheduler does otherwise where a run is to be compared with ours: no buffer, no clean-up, a server for each
request. What holds under any order of events is in test_core_scheduler_machine.py."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from prorl_hpc.core.balancer import PER_REQUEST
from prorl_hpc.core.events import Cancel, Order, ServerDrains, ServerLost, Tick, WorkerLost
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    Pools,
    RequestServers,
    ServerTrouble,
)
from prorl_hpc.messages.rollout import Budgets, FailureKind, Stage, Status

SLOTS = Pools(init=2, ready=0, run=2, eval=1)


class TestNoBuffer:
    def test_an_init_begins_only_when_a_run_slot_waits_for_it(self) -> None:
        bench = Bench()
        bench.worker(pools=SLOTS)
        bench.server()
        bench.submit("a", "b", "c")
        assert bench.started == [("init", "a", "w"), ("init", "b", "w")]
        bench.ends("a", Stage.INIT)
        bench.ends("b", Stage.INIT)
        assert bench.started[2:] == [("run", "a", "w"), ("run", "b", "w")], "both RUN slots are taken: no INIT for c"
        bench.ends("a", Stage.RUN)
        assert bench.started[4:] == [("eval", "a", "w"), ("init", "c", "w")]

    def test_init_slots_bound_it_too(self) -> None:
        bench = Bench()
        bench.worker(pools=Pools(init=1, ready=0, run=4, eval=1))
        bench.submit("a", "b")
        assert bench.started == [("init", "a", "w")]

    def test_work_goes_where_most_run_slots_wait(self) -> None:
        bench = Bench()
        bench.server()
        bench.worker("full", pools=Pools(init=4, ready=0, run=4, eval=1))
        bench.submit("a", "b")
        for name in "ab":
            bench.ends(name, Stage.INIT, "full")
        bench.worker("empty", pools=Pools(init=4, ready=0, run=4, eval=1))
        bench.submit("c", "d")
        assert bench.started[-2:] == [("init", "c", "empty"), ("init", "d", "empty")]


@pytest.fixture
def stale() -> Bench:
    """``a`` was cancelled in RUN, and goes on; ``b`` waits for its slot."""
    bench = Bench(abort_cancelled=False, report_grace_s=5.0)
    bench.worker(pools=Pools(init=2, ready=2, run=1, eval=1))
    bench.server()
    bench.submit("a", "b", budgets=Budgets(run_s=10.0))
    for name in "ab":
        bench.ends(name, Stage.INIT)
    bench.tell(Cancel(("a",)))
    return bench


class TestNoCleanUp:
    def test_what_is_cancelled_in_run_keeps_its_slots_to_its_end(self, stale: Bench) -> None:
        assert stale.results["a"].status is Status.CANCELLED, "for whoever ordered it, it is over"
        assert stale.discarded == [] and stale.scheduler.servers.assigned("s") == 1
        assert ("run", "b", "w") not in stale.started
        stale.ends("a", Stage.RUN)
        assert stale.discarded == [("w", "a")] and stale.scheduler.servers.assigned("s") == 0
        stale.tell(Discarded("w", "a"))
        assert stale.started[-1] == ("run", "b", "w")
        assert "a" not in [name for stage, name, _ in stale.started if stage == "eval"]

    def test_one_that_fails_leaves_nothing_to_discard(self, stale: Bench) -> None:
        stale.breaks("a", Stage.RUN, FailureKind.SANDBOX)
        assert stale.discarded == []
        assert stale.started[-1] == ("run", "b", "w"), "and it is not tried again"

    def test_a_worker_that_does_not_report_it_is_not_waited_for(self, stale: Bench) -> None:
        stale.tell(Tick(), at=14.9)
        assert stale.discarded == []
        stale.tell(Tick(), at=15.1)
        assert stale.discarded == [("w", "a")]

    def test_a_lost_server_ends_it(self, stale: Bench) -> None:
        stale.server("s2")
        stale.tell(ServerLost("s", "silent"))
        assert (stale.discarded, stale.moved) == ([("w", "a")], [])

    def test_a_server_that_does_not_answer_ends_it(self, stale: Bench) -> None:
        stale.tell(ServerTrouble("w", "a", "s", "silent"))
        assert (stale.discarded, stale.moved) == ([("w", "a")], [])

    @pytest.mark.parametrize("held", [(), (Held("a", running=Stage.RUN),)])
    def test_a_hello_of_its_worker_ends_it(self, stale: Bench, held: tuple[Held, ...]) -> None:
        stale.worker(held=held)
        assert ("w", "a") in stale.discarded
        assert stale.scheduler.servers.assigned("s") == 0

    def test_a_lost_worker_takes_it_along(self, stale: Bench) -> None:
        stale.tell(WorkerLost("w", "silent"))
        assert stale.scheduler.servers.assigned("s") == 0
        assert stale.discarded == []

    def test_what_does_not_run_is_stopped_all_the_same(self, stale: Bench) -> None:
        stale.tell(Cancel(("b",)))
        assert stale.discarded == [("w", "b")]


def test_with_clean_up_the_order_to_stop_comes_with_the_cancellation(bench: Bench) -> None:
    bench.submit("a")
    bench.ends("a", Stage.INIT)
    said = bench.tell(Cancel(("a",)))
    assert Order("w", Discard("a")) in said
    assert bench.scheduler.servers.assigned("s") == 0


class TestAServerForEachRequest:
    @pytest.fixture
    def bench(self) -> Bench:
        made = Bench(balancing=PER_REQUEST)
        made.server("s1")
        made.worker()
        made.server("s2")
        return made

    def test_workers_hear_of_servers_as_they_come_and_go(self, bench: Bench) -> None:
        assert told(bench) == [("w", ["s1"], ""), ("w", ["s1", "s2"], "")]
        bench.server("s2")
        assert len(told(bench)) == 2, "nothing has changed"
        bench.server("s2", healthy=False)
        bench.server("s2")
        bench.tell(ServerDrains("s1", True))
        bench.server("s2", version=1)
        assert told(bench)[2:] == [("w", ["s1"], ""), ("w", ["s1", "s2"], ""), ("w", ["s2"], "")]
        bench.tell(ServerLost("s2", "silent"))
        assert told(bench)[-1] == ("w", [], "s2")

    def test_they_hear_of_them_before_they_are_to_ask_them(self, bench: Bench) -> None:
        bench.tell(ServerLost("s1", "silent"))
        bench.tell(ServerLost("s2", "silent"))
        bench.submit("a")
        bench.ends("a", Stage.INIT)
        bench.server("s3")
        assert [type(c.message).__name__ for c in bench.said[-2:] if isinstance(c, Order)] == [
            "RequestServers",
            "StartRun",
        ]

    def test_a_lost_server_moves_no_run_and_retries_none(self, bench: Bench) -> None:
        bench.submit("a", "b")
        for name in "ab":
            bench.ends(name, Stage.INIT)
        bench.tell(ServerLost("s1", "silent"))
        assert (bench.moved, bench.discarded) == ([], [])
        assert bench.scheduler.servers.assigned("s2") == 2
        bench.tell(ServerLost("s2", "silent"))
        assert bench.discarded == [("w", "a"), ("w", "b")], "none is left"

    @pytest.mark.parametrize("server", ["s1", "s2"])
    def test_whichever_server_does_not_answer_another_is_named(self, bench: Bench, server: str) -> None:
        bench.submit("a")
        bench.ends("a", Stage.INIT)
        bench.tell(ServerTrouble("w", "a", server, "silent"))
        assert bench.moved == [("a", {"s1": "s2", "s2": "s1"}[server])]

    def test_others_are_told_nothing(self) -> None:
        sticky = Bench()
        sticky.worker()
        sticky.server()
        sticky.tell(ServerLost("s", "silent"))
        assert told(sticky) == []


def told(bench: Bench) -> list[tuple[str, list[str], str]]:
    """(worker, servers, the lost one) of each time."""
    orders = [command for command in bench.said if isinstance(command, Order)]
    return [
        (order.worker_id, [ref.server_id for ref in order.message.servers], order.message.lost)
        for order in orders
        if isinstance(order.message, RequestServers)
    ]
