"""What a restart rebuilds from the journal's records is what was there."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_hpc.core.groups import CarriedGroup
from prorl_hpc.messages.batch import BatchSpec, GroupFilter, Refill, WhenFull
from prorl_hpc.messages.rollout import Budgets, RolloutResult, RolloutSpec, Status
from prorl_hpc.rollout.journal_records import OpenBatch, OpenRollout
from prorl_hpc.rollout.orders import Orders

BUDGETS = Budgets(run_s=7.0)


@dataclass
class Record:
    """A batch in the journal."""

    spec: BatchSpec
    carried: tuple[CarriedGroup, ...] = ()
    before: tuple[RolloutResult, ...] = ()
    log: list[RolloutResult | None] = field(default_factory=list)
    state: str = "running"


class World:
    """Orders as the coordinator drives them, and what the journal would have of it."""

    def __init__(self) -> None:
        self.orders = Orders(BUDGETS)
        self.records: dict[str, Record | OpenRollout] = {}
        self.living: dict[str, RolloutSpec] = {}
        self.count = 0

    def act(self, submit: tuple[RolloutSpec, ...], cancel: tuple[str, ...]) -> None:
        self.living.update({spec.rollout_id: spec for spec in submit})
        for rollout_id in cancel:
            if rollout_id in self.living:
                self.end(rollout_id, None)

    def order(self, spec: BatchSpec, early: list[tuple[int, float | None]]) -> None:
        closes, carried, before = self.orders.take_over(spec)
        if closes:
            del self.records[closes]
        self.records[spec.batch_id] = Record(spec, tuple(carried), tuple(before))
        for which, reward in early:  # while the order gets onto disk
            if self.living:
                self.end(sorted(self.living)[which % len(self.living)], reward)
        moves, over = self.orders.begin_batch(spec, 0.0, carried, before)
        self.act(moves.submit, moves.cancel)
        self.finish(spec.batch_id, over)

    def end(self, rollout_id: str, reward: float | None) -> None:
        spec = self.living.pop(rollout_id)
        status = Status.DONE if reward is not None else Status.CANCELLED
        result = RolloutResult(rollout_id, spec.group_id, spec.sample, spec.task, status, reward)
        batch_id, moves, over = self.orders.ended(result, 0.0)
        record = self.records.get(batch_id)
        if isinstance(record, Record):
            record.log.append(result)
        else:
            assert not batch_id
            del self.records[rollout_id]
        self.finish(batch_id, over)
        self.act(moves.submit, moves.cancel)

    def cancel(self, batch_id: str) -> None:
        record = self.records[batch_id]
        if isinstance(record, Record) and self.orders.running(batch_id) is not None:
            record.log.append(None)
            moves, over = self.orders.cancel_batch(batch_id, 0.0)
            self.act(moves.submit, moves.cancel)
            self.finish(batch_id, over)

    def finish(self, batch_id: str, over: object) -> None:
        record = self.records.get(batch_id)
        if over is not None and isinstance(record, Record):
            if over.carries_on:  # type: ignore[attr-defined]
                record.state = "full"
            else:
                del self.records[batch_id]

    def open(self) -> list[OpenBatch | OpenRollout]:
        return [
            record
            if isinstance(record, OpenRollout)
            else OpenBatch(record.spec, record.carried, record.before, tuple(record.log), {}, record.state)
            for record in self.records.values()
        ]


def spec(number: int, wanted: int, parallel: int, carry: bool, rounds: bool, client: str) -> BatchSpec:
    return BatchSpec(
        f"b{number}", "t", [{"id": f"{number}-{i}"} for i in range(4)], min(wanted, 4), 2, client=client,
        filter=GroupFilter.INFORMATIVE, max_parallel_groups=parallel,
        when_full=WhenFull.CARRY if carry else WhenFull.CANCEL, refill=Refill.IN_ROUNDS if rounds else Refill.AT_ONCE,
    )  # fmt: skip


ENDS = st.tuples(st.integers(0, 50), st.sampled_from([0.0, 0.0, 1.0, 1.0, None]))
BATCHES = st.tuples(
    st.just("batch"), st.sampled_from([1, 1, 2]), st.integers(2, 4), st.sampled_from([True, True, False]),
    st.booleans(), st.sampled_from("xxy"), st.lists(ENDS, max_size=6),
)  # fmt: skip
ACTIONS = st.one_of(
    *[ENDS] * 8,
    *[BATCHES] * 3,
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.just(("rollout",)),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=10, max_size=80))
def test_any_history(actions: list[tuple]) -> None:
    world = World()
    for action in actions:
        if action[0] == "batch":
            world.count += 1
            world.order(spec(world.count, *action[1:6]), action[6])
        elif action[0] == "cancel" and world.records:
            world.cancel(sorted(world.records)[action[1] % len(world.records)])
        elif action[0] == "rollout":
            world.count += 1
            single = RolloutSpec(f"r{world.count}", "t", {})
            world.records[single.rollout_id] = OpenRollout(single, 1)
            world.act(world.orders.begin_rollouts([single]).submit, ())
        elif isinstance(action[0], int) and world.living:
            world.end(sorted(world.living)[action[0] % len(world.living)], action[1])

    again = Orders(BUDGETS)
    resumed = again.resume(world.open(), 0.0)
    under_way = {one.spec.rollout_id: one.spec for one in resumed.under_way}
    assert under_way == world.living
    assert resumed.moves.cancel == () and resumed.over == ()
    assert all(rollout.budgets == BUDGETS for rollout in under_way.values())
    for batch_id in world.records:
        was, now = world.orders.running(batch_id), again.running(batch_id)
        assert (was is None) == (now is None)
        if was is not None and now is not None:
            assert now.progress() == was.progress()
    # What comes next is the same: the batches that carry on hand the same groups over.
    for client in "xy":
        later = spec(99, 1, 4, True, False, client)
        assert again.take_over(later) == world.orders.take_over(later)
