"""Least in flight wins, sticky, returned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.core.balancer import ServerBalancer
from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.messages.control import ServerRef


def ref(server_id: str, policy: str = "policy") -> ServerRef:
    return ServerRef(server_id, "n", "ipc://x", "", policy)


@pytest.fixture
def balancer() -> ServerBalancer:
    made = ServerBalancer()
    made.seen(ref("a"), 0, True)
    made.seen(ref("b"), 0, True)
    return made


def chosen(balancer: ServerBalancer, *names: str) -> list[str]:
    return [found.server_id if (found := balancer.assign(name, "policy")) else "-" for name in names]


def test_load_is_spread_and_sticky(balancer: ServerBalancer) -> None:
    assert sorted(chosen(balancer, "1", "2", "3", "4")) == ["a", "a", "b", "b"]
    assert chosen(balancer, "1", "2") == chosen(balancer, "1", "2")
    assert (balancer.assigned("a"), balancer.assigned("b")) == (2, 2)


def test_what_is_returned_counts_no_more(balancer: ServerBalancer) -> None:
    on = dict(zip("1234", chosen(balancer, *"1234"), strict=True))
    for name, server in on.items():
        if server == "a":
            balancer.release(name)
            balancer.release(name)
    assert chosen(balancer, "5", "6") == ["a", "a"]


def test_a_late_joiner_does_not_take_all(balancer: ServerBalancer) -> None:
    """Counters that only rise would give it everything until it has caught up with the whole past."""
    for i in range(1000):
        chosen(balancer, f"old{i}")
        balancer.release(f"old{i}")
    chosen(balancer, *(f"now{i}" for i in range(4)))
    balancer.seen(ref("c"), 0, True)
    taken = chosen(balancer, *(f"new{i}" for i in range(8)))
    assert {s: taken.count(s) for s in "abc"} == {"a": 2, "b": 2, "c": 4}


def test_only_healthy_servers_with_the_newest_weights(balancer: ServerBalancer) -> None:
    balancer.seen(ref("a"), 3, True)
    assert set(chosen(balancer, "1", "2")) == {"a"}
    balancer.seen(ref("b"), 3, True)
    assert set(chosen(balancer, "3", "4")) == {"b"}
    balancer.seen(ref("a"), 3, False)
    assert chosen(balancer, "5") == ["b"]
    balancer.seen(ref("b"), 0, True)  # started anew, with the weights on disk
    assert chosen(balancer, "6") == ["-"]
    balancer.seen(ref("a"), 3, True)
    assert chosen(balancer, "6") == ["a"]


def test_a_lost_server_gives_its_assignments_back(balancer: ServerBalancer) -> None:
    on = dict(zip("1234", chosen(balancer, *"1234"), strict=True))
    assert balancer.lost("a") == sorted(name for name, server in on.items() if server == "a")
    assert balancer.lost("a") == []
    assert set(chosen(balancer, *"1234")) == {"b"}
    assert (balancer.assigned("a"), balancer.assigned("b")) == (0, 4)


def test_servers_to_avoid_come_last(balancer: ServerBalancer) -> None:
    for name in "123":
        found = balancer.assign(name, "policy", avoid={"a"})
        assert found is not None and found.server_id == "b"
    balancer.lost("b")
    found = balancer.assign("4", "policy", avoid={"a"})
    assert found is not None and found.server_id == "a"


def test_policies_are_apart(balancer: ServerBalancer) -> None:
    balancer.seen(ref("j", "judge"), 7, True)
    assert set(chosen(balancer, "1", "2")) == {"a", "b"}
    found = balancer.assign("3", "judge")
    assert found is not None and found.server_id == "j"
    assert balancer.assign("4", "none") is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.integers(0, 3))), max_size=200))
def test_least_loaded_agrees_with_a_plain_search(changes: list[tuple[str, int | None]]) -> None:
    loads: dict[str, int] = {}
    heap: LeastLoaded[float] = LeastLoaded()
    for key, load in changes:
        if load is None:
            loads.pop(key, None)
            heap.discard(key)
        else:
            loads[key] = load
            heap.set(key, load)
        for without in (set(), {"a"}, {"a", "b", "c", "d"}):
            least = heap.least(without)
            left = {k: v for k, v in loads.items() if k not in without}
            assert (least is None) == (not left)
            assert least is None or left[least] == min(left.values())
        assert len(heap) == len(loads)
