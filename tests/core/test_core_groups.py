"""The DAPO group sampler."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.core.groups import BatchSampler, Moves
from prorl_hpc.messages.batch import BatchSpec, BatchState, GroupFilter, GroupOutcome, Refill, WhenFull
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, RolloutSpec, Stage, Status


def order(**changes: object) -> BatchSpec:
    values: dict[str, object] = {
        "batch_id": "b",
        "task": "t",
        "rows": [{"id": f"r{i}"} for i in range(10)],
        "groups_wanted": 2,
        "group_size": 2,
    }
    return BatchSpec(**(values | changes))  # type: ignore[arg-type]


def end(spec: RolloutSpec, reward: float | None, status: Status | None = None) -> RolloutResult:
    status = status or (Status.DONE if reward is not None else Status.FAILED)
    failure = None if reward is not None else Failure(Stage.RUN, FailureKind.INFRASTRUCTURE, "gone")
    return RolloutResult(
        spec.rollout_id, spec.group_id, spec.sample, spec.task, status, reward, failure=failure, row_id=spec.row["id"]
    )


def play(batch: BatchSampler, rewards: dict[str, list[float | None]]) -> list[Moves]:
    """Finish rollouts in the order of their start with the rewards given per row id."""
    moves = [batch.begin(0.0)]
    todo, cancelled = deque(moves[0].submit), set()
    while todo:
        spec = todo.popleft()
        result = (
            end(spec, None, Status.CANCELLED)
            if spec.rollout_id in cancelled
            else end(spec, rewards[spec.row["id"]][spec.sample])
        )
        moves.append(batch.finished(result, 1.0))
        todo.extend(moves[-1].submit)
        cancelled.update(moves[-1].cancel)
    return moves


def test_ids_rows_and_settings_go_into_the_rollouts() -> None:
    specs = BatchSampler(order(priority=7, policy="p"), 0.0).begin(0.0).submit
    assert [s.rollout_id for s in specs] == ["b.g0.s0", "b.g0.s1", "b.g1.s0", "b.g1.s1"]
    assert {(s.group_id, s.row["id"]) for s in specs} == {("b.g0", "r0"), ("b.g1", "r1")}
    assert {(s.priority, s.policy) for s in specs} == {(7, "p")}


def test_a_uniform_group_is_dropped_and_replaced_at_once() -> None:
    batch = BatchSampler(order(), 0.0)
    moves = play(batch, {"r0": [1, 1], "r1": [0, 1], "r2": [1, 0]})
    assert [s.rollout_id for s in moves[2].submit] == ["b.g2.s0", "b.g2.s1"]
    result = batch.result()
    assert [g.outcome for g in result.groups] == [GroupOutcome.UNIFORM, GroupOutcome.ACCEPTED, GroupOutcome.ACCEPTED]
    assert (result.progress.state, result.progress.rows_used, result.progress.uniform) == (BatchState.DONE, 3, 1)
    assert result.elapsed_s == 1.0


def test_every_group_counts_without_the_filter_even_of_one_sample() -> None:
    batch = BatchSampler(order(filter=GroupFilter.ALL, group_size=1, groups_wanted=3), 0.0)
    play(batch, {"r0": [1], "r1": [1], "r2": [0]})
    assert (batch.state, batch.progress().accepted) == (BatchState.DONE, 3)


def test_samples_that_broke_are_left_out_of_the_groups_statistics() -> None:
    batch = BatchSampler(order(group_size=3, groups_wanted=1), 0.0)
    # r0: the two that are left agree: uniform, although a broken one has no reward. r1: too few left. r2: fine.
    play(batch, {"r0": [1, None, 1], "r1": [1, None, None], "r2": [None, 0, 1]})
    outcomes = [g.outcome for g in batch.result().groups]
    assert outcomes == [GroupOutcome.UNIFORM, GroupOutcome.BROKEN, GroupOutcome.ACCEPTED]
    assert batch.progress().rollouts_failed == 4


def test_the_supply_runs_out() -> None:
    batch = BatchSampler(order(rows=[{"id": "r0"}, {"id": "r1"}, {"id": "r2"}]), 0.0)
    play(batch, {"r0": [1, 1], "r1": [0, 0], "r2": [0, 1]})
    assert (batch.progress().state, batch.progress().accepted) == (BatchState.EXHAUSTED, 1)


def test_spare_groups_are_cancelled_when_the_batch_is_full() -> None:
    batch = BatchSampler(order(max_parallel_groups=3), 0.0)
    moves = play(batch, {"r0": [0, 1], "r1": [0, 1], "r2": [0, 1]})
    assert len(moves[0].submit) == 6
    assert [m.cancel for m in moves if m.cancel] == [("b.g2.s0", "b.g2.s1")]
    assert batch.finished_all
    assert [g.outcome for g in batch.result().groups][-1] is GroupOutcome.CANCELLED


def test_groups_in_flight_are_bounded() -> None:
    batch = BatchSampler(order(max_parallel_groups=1), 0.0)
    moves = play(batch, {"r0": [0, 1], "r1": [0, 1]})
    assert len(moves[0].submit) == 2
    assert batch.progress().accepted == 2


def test_cancel_keeps_what_is_there() -> None:
    batch = BatchSampler(order(), 0.0)
    specs = batch.begin(0.0).submit
    for spec in specs[:3]:
        batch.finished(end(spec, float(spec.sample)), 1.0)
    assert batch.cancel(2.0).cancel == ("b.g1.s1",)
    assert batch.cancel(2.0).cancel == ()
    assert batch.progress().state is BatchState.RUNNING  # until its last rollout has ended
    batch.finished(end(specs[3], None, Status.CANCELLED), 3.0)
    assert batch.progress().state is BatchState.CANCELLED
    assert [len(g.rollouts) for g in batch.result().groups] == [2, 2]


def test_a_result_said_twice_changes_nothing() -> None:
    batch = BatchSampler(order(), 0.0)
    spec = batch.begin(0.0).submit[0]
    batch.finished(end(spec, 1.0), 1.0)
    before = batch.result()
    batch.finished(end(spec, 0.0), 1.0)
    assert batch.result() == before


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=3, max_size=3), min_size=1, max_size=12),
    wanted=st.integers(1, 4),
    parallel=st.integers(0, 6),
    kind=st.sampled_from(GroupFilter),
)
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_any_batch_ends_and_its_numbers_agree(
    rewards: list[list[float | None]], wanted: int, parallel: int, kind: GroupFilter
) -> None:
    rows = [{"id": f"r{i}"} for i in range(len(rewards))]
    spec = order(rows=rows, groups_wanted=wanted, group_size=3, max_parallel_groups=parallel, filter=kind)
    batch = BatchSampler(spec, 0.0)
    play(batch, {f"r{i}": list(given) for i, given in enumerate(rewards)})
    progress, result = batch.progress(), batch.result()
    assert batch.finished_all
    outcomes = [g.outcome for g in result.groups]
    assert progress.accepted == outcomes.count(GroupOutcome.ACCEPTED) <= wanted
    assert (progress.state is BatchState.DONE) == (progress.accepted == wanted)
    if progress.state is BatchState.EXHAUSTED:
        assert progress.rows_used == len(rows)
    assert [g.row_index for g in result.groups] == list(range(progress.rows_used))
    assert all(len(g.rollouts) == 3 for g in result.groups)


def test_in_rounds_a_dropped_group_is_replaced_when_the_round_is_over() -> None:
    batch = BatchSampler(order(refill=Refill.IN_ROUNDS), 0.0)
    moves = play(batch, {"r0": [1, 1], "r1": [0, 1], "r2": [0, 1]})
    assert [[s.row["id"] for s in m.submit] for m in moves if m.submit] == [["r0"] * 2 + ["r1"] * 2, ["r2"] * 2]
    assert batch.progress().accepted == 2


def test_a_full_batch_carries_its_groups_on_with_all_that_they_have() -> None:
    first = BatchSampler(order(groups_wanted=1, max_parallel_groups=3, when_full=WhenFull.CARRY), 0.0)
    a0, a1, b0, b1, c0, c1 = first.begin(0.0).submit
    first.finished(end(b0, 0.0), 1.0)
    for spec in (a0, a1):
        moves = first.finished(end(spec, float(spec.sample)), 2.0)
    assert moves == Moves()  # nothing is cancelled
    assert first.finished_all and first.carries_on
    assert [(g.outcome, len(g.rollouts)) for g in first.result().groups] == [
        (GroupOutcome.ACCEPTED, 2),
        (GroupOutcome.CARRIED, 0),
        (GroupOutcome.CARRIED, 0),
    ]
    first.finished(end(c0, 1.0), 3.0)
    first.finished(end(c1, 1.0), 3.0)  # whole before it is taken over
    carried, before = first.hand_over()
    assert not first.carries_on

    second = BatchSampler(order(batch_id="second", groups_wanted=1, when_full=WhenFull.CARRY), 4.0, carried, before)
    assert second.under_way == [b1]
    assert second.begin(4.0) == Moves()  # the group under way is enough; the uniform one is dropped
    second.finished(end(b1, 1.0), 5.0)
    assert second.progress().state is BatchState.DONE
    assert (second.progress().carried_in, second.progress().rows_used) == (2, 0)
    found = {g.group_id: (g.carried_from, g.row_index, g.outcome, len(g.rollouts)) for g in second.result().groups}
    assert found == {
        "b.g1": ("b", 1, GroupOutcome.ACCEPTED, 2),
        "b.g2": ("b", 2, GroupOutcome.UNIFORM, 2),
    }


def test_a_group_that_is_carried_twice_keeps_its_first_batch() -> None:
    first = BatchSampler(order(groups_wanted=1, max_parallel_groups=2, when_full=WhenFull.CARRY), 0.0)
    a0, a1, b0, _ = first.begin(0.0).submit
    for spec in (a0, a1):
        first.finished(end(spec, float(spec.sample)), 1.0)
    second = BatchSampler(
        order(batch_id="second", groups_wanted=1, max_parallel_groups=2, when_full=WhenFull.CARRY), 2.0,
        *first.hand_over(),
    )  # fmt: skip
    for spec in second.begin(2.0).submit:
        second.finished(end(spec, float(spec.sample)), 3.0)
    carried, before = second.hand_over()
    assert [(c.carried_from, c.group_id, c.row_index) for c in carried] == [("b", "b.g1", 1)]
    assert before == []
    assert b0 in carried[0].specs
