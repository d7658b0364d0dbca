"""Attempts in a row, cut off at random moments: nothing is lost, nothing is trained on twice, no retry is used up."""

from __future__ import annotations

from random import Random

from attempt_chain import Attempt, Disk
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = 12


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    carry=st.booleans(),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["kill", "stop", "drain"])), min_size=20, max_size=20),
)
def test_twenty_attempts_cut_off_at_random(seed: int, carry: bool, cuts: list[tuple[int, str]]) -> None:
    disk, random = Disk(), Random(seed)
    names: set[str] = set()
    for after, how in [*cuts, (100_000, "kill")]:
        recorded = dict(disk.results)
        attempt = Attempt(disk, random, STEPS, carry)
        for _ in range(after):
            if attempt.done:
                break
            attempt.act()
        if how != "kill" and not attempt.done:
            disk.checkpoint = (attempt.step, attempt.cursor)  # the trainer saves at once
            before = len(attempt.names)
            attempt.drain()
            for _ in range(random.randrange(20) if how == "drain" else 0):
                attempt.work()
            attempt.workers_leave()
            assert len(attempt.names) == before, "a rollout was started while draining"
        assert not names & set(attempt.names), "an attempt has the name of an earlier one"
        names |= set(attempt.names)
        assert all(disk.results[name] == count for name, count in recorded.items()), "a recorded rollout ran again"
        # A batch is made by the weights of its step; what it carried over may be older.
        assert all(version >= int(batch.removeprefix("step-")) for version, batch in attempt.runs)
        if not carry:
            assert all(version == int(batch.removeprefix("step-")) for version, batch in attempt.runs)
    assert attempt.done
    assert set(disk.results.values()) == {1}, "each rollout ended once"
    assert sorted(disk.trained) == list(range(1, STEPS + 1))
    assert {f"step-{n}" for n in disk.trained} == set(disk.closed)
    assert [g.carried_from for r in disk.closed.values() for g in r.groups if g.carried_from and not carry] == []
