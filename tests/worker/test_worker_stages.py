"""Stages on a worker: success, time-outs, each kind of failure, discard in each stage, and nothing left behind."""

from __future__ import annotations

import pytest
from worker_bench import SERVER, Bench, trajectory_of

from prorl_hpc.messages.control import Discard, Discarded, StageFinished, StartEval, StartRun, WorkerHello
from prorl_hpc.messages.rollout import FailureKind, Stage
from prorl_hpc.worker import attempt

STAGES = list(Stage)


@pytest.fixture(autouse=True)
async def welcomed(bench: Bench) -> None:
    await bench.coordinator.expect(WorkerHello)


def trained_tokens(report: StageFinished | Discarded) -> int:
    trajectory = trajectory_of(report)
    assert trajectory is not None
    return trajectory.num_trained_tokens


async def advance(bench: Bench, rollout_id: str, stage: Stage) -> StageFinished:
    """Order ``stage`` of a rollout whose earlier stages are done; the row is given at INIT."""
    return await (bench.run(rollout_id) if stage is Stage.RUN else bench.eval(rollout_id))


async def up_to(bench: Bench, rollout_id: str, stage: Stage, **row: str) -> StageFinished:
    """Go through the stages to ``stage`` and return its report."""
    done = await bench.init(rollout_id, **row)
    for following in STAGES[1 : STAGES.index(stage) + 1]:
        assert done.failure is None
        done = await advance(bench, rollout_id, following)
    return done


async def test_a_rollout_through_all_stages(bench: Bench) -> None:
    init = await bench.init("r1", reward=0.75)
    assert (init.worker_id, init.stage, init.failure) == ("worker-0", Stage.INIT, None)
    assert len(bench.sandboxes) == 1
    run = await bench.run("r1")
    assert (run.stage, run.failure, run.reward) == (Stage.RUN, None, None)
    assert trained_tokens(run) > 0
    assert bench.llms.asked == [("server-0", "r1", 7)]
    scored = await bench.eval("r1")
    assert (scored.failure, scored.reward, scored.metrics) == (None, 0.75, {"length": 5.0})
    await bench.until_no_sandbox_runs()


async def test_many_rollouts_at_once(bench: Bench) -> None:
    for i in range(20):
        await bench.start_init(f"r{i}")
    done = {(await bench.coordinator.expect(StageFinished)).rollout_id for _ in range(20)}
    assert len(done) == 20
    assert len({s.sandbox_id for s in bench.runtime.started}) == 20


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ("sandbox", FailureKind.SANDBOX, "the sandbox broke"),
        ("inference", FailureKind.INFERENCE, "the server broke"),
        ("infrastructure", FailureKind.INFRASTRUCTURE, "the line broke"),
        ("task", FailureKind.TASK, "KeyError: 'a bug'"),
        ("exit", FailureKind.TASK, "SystemExit: 3"),
    ],
)
async def test_failures_carry_their_stage_and_kind(
    bench: Bench, stage: Stage, does: str, kind: FailureKind, message: str
) -> None:
    done = await up_to(bench, "r1", stage, **{stage.value: does})
    assert done.failure is not None
    assert (done.failure.stage, done.failure.kind, done.failure.message) == (stage, kind, message)
    assert not done.timed_out
    assert done.reward is None
    if stage is Stage.RUN:
        assert trained_tokens(done) > 0
    await bench.until_no_sandbox_runs()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_that_uses_up_its_budget_is_timed_out(bench: Bench, stage: Stage) -> None:
    row = {stage.value: "hang"}
    if stage is Stage.INIT:
        done = await bench.init("r1", 0.05, **row)
    else:
        await bench.init("r1", **row)
        if stage is Stage.RUN:
            done = await bench.run("r1", 0.3)
            assert trained_tokens(done) > 0
        else:
            await bench.run("r1")
            done = await bench.eval("r1", 0.05)
    assert done.timed_out
    assert done.failure is not None and "budget" in done.failure.message
    await bench.until_no_sandbox_runs()


async def test_a_sandbox_that_does_not_start(bench: Bench) -> None:
    bench.runtime.fail_starts = 1
    done = await bench.init("r1")
    assert done.failure is not None
    assert done.failure.kind is FailureKind.SANDBOX
    assert "did not start" in done.failure.message


async def test_a_row_or_task_that_does_not_fit_fails_init(bench: Bench) -> None:
    done = await bench.init("r1", bad=1)
    assert done.failure is not None
    assert (done.failure.kind, done.failure.message) == (FailureKind.TASK, "ValueError: field bad is not allowed")
    assert bench.runtime.started == []


async def test_rewards_that_are_no_numbers_are_refused(bench: Bench) -> None:
    done = await up_to(bench, "r1", Stage.EVAL, reward="nan")
    assert done.failure is not None and "reward=nan" in done.failure.message


@pytest.mark.parametrize("does", ["hang", "stubborn"])
@pytest.mark.parametrize("stage", STAGES)
async def test_discard_while_a_stage_runs(bench: Bench, stage: Stage, does: str) -> None:
    row = {stage.value: does}
    if stage is Stage.INIT:
        await bench.start_init("r1", **row)
    else:
        done = await bench.init("r1", **row)
        if stage is Stage.EVAL:
            done = await bench.run("r1")
        assert done.failure is None
        order = StartRun if stage is Stage.RUN else StartEval
        arguments = ("r1", SERVER, 20.0) if stage is Stage.RUN else ("r1", 20.0)
        await bench.coordinator.order(order(*arguments))
    await bench.until_a_sandbox_runs()
    await bench.coordinator.order(Discard("r1"))
    discarded = await bench.coordinator.expect(Discarded)
    assert (discarded.worker_id, discarded.rollout_id) == ("worker-0", "r1")
    if stage is Stage.EVAL:
        assert discarded.trajectory is not None
    assert bench.sandboxes == []
    reports = [m.stage for m in bench.coordinator.log if isinstance(m, StageFinished)]
    assert stage not in reports


async def test_discard_between_stages_and_of_unknown_rollouts(bench: Bench) -> None:
    await bench.init("r1")
    await bench.coordinator.order(Discard("r1"))
    assert (await bench.coordinator.expect(Discarded)).rollout_id == "r1"
    assert bench.sandboxes == []
    await bench.coordinator.order(Discard("never-heard-of"))
    assert (await bench.coordinator.expect(Discarded)).trajectory is None


async def test_stages_of_unknown_rollouts_are_infrastructure_failures(bench: Bench) -> None:
    for done in (await bench.run("r9"), await bench.eval("r9")):
        assert done.failure is not None and done.failure.kind is FailureKind.INFRASTRUCTURE


async def test_a_rollout_started_anew_replaces_the_old_one(bench: Bench) -> None:
    await bench.init("r1")
    await bench.init("r1")
    first, second = bench.runtime.started
    assert (await bench.run("r1")).failure is None
    assert first.stopped
    assert not second.stopped


@pytest.mark.parametrize(("what", "message"), [("huge", "cannot be encoded: OverflowError"), ("long", "at most 600")])
async def test_a_trajectory_that_cannot_be_sent_fails_its_rollout_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    monkeypatch.setattr(attempt, "MAX_TRAJECTORY_BYTES", 600)
    done = await up_to(bench, "r1", Stage.RUN, unsendable=what)
    assert done.failure is not None and done.failure.kind is FailureKind.TASK
    assert message in done.failure.message and done.trajectory is None
    await bench.until_no_sandbox_runs()
    await bench.coordinator.order(Discard("r1"))
    assert (await bench.coordinator.expect(Discarded)).trajectory is None
    assert (await up_to(bench, "r2", Stage.EVAL)).failure is None


async def test_a_discard_is_answered_whatever_was_generated(bench: Bench) -> None:
    await bench.init("r1", unsendable="huge", run="hang")
    await bench.coordinator.order(StartRun("r1", SERVER, 60))
    await bench.until(lambda: len(bench.llms.answered_by) == 2)
    await bench.coordinator.order(Discard("r1"))
    assert (await bench.coordinator.expect(Discarded)).trajectory is None


async def test_words_that_cannot_be_sent_are_reported_all_the_same(bench: Bench) -> None:
    done = await up_to(bench, "r1", Stage.RUN, run="half")
    assert done.failure is not None and done.failure.message == "ValueError: odd \\ud800"
    done = await up_to(bench, "r2", Stage.EVAL, half_scored="yes")
    assert (
        done.failure is not None
        and done.failure.kind is FailureKind.TASK
        and "cannot be encoded" in done.failure.message
    )
