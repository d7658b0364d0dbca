"""What a worker keeps, says again and forgets: reports, acknowledgements, discards, moves, draining."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import staged_task
from worker_bench import PATIENCE_S, SERVER, Bench, FakeCoordinator, trajectory_of

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.control import (
    Acknowledge,
    Discard,
    Discarded,
    Draining,
    Goodbye,
    Held,
    MoveRun,
    ServerRef,
    ServerTrouble,
    Shutdown,
    StageFinished,
    StartEval,
    StartRun,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.rollout import FailureKind, Stage
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker import stages

OTHER = ServerRef("server-1", "node-b", "ipc:///none", "")


@pytest.fixture
def config(config: ProrlConfig) -> ProrlConfig:
    config.rollout.lost_after_s = 60.0
    return config


@pytest.fixture(autouse=True)
async def welcomed(bench: Bench) -> None:
    await bench.coordinator.expect(WorkerHello)


async def hello_again(bench: Bench) -> dict[str, Held]:
    """What the worker says it holds to a coordinator that does not know it."""
    bench.coordinator.knows = False
    return {held.rollout_id: held for held in (await bench.coordinator.expect(WorkerHello)).held}


async def held_is(bench: Bench, *rollout_ids: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while set(await hello_again(bench)) != set(rollout_ids):
            pass


class TestHello:
    async def test_it_names_each_attempt_with_its_reports_and_its_stage(self, bench: Bench) -> None:
        for rollout_id, row in {"a": {}, "b": {"run": "hang"}, "c": {}, "d": {"eval": "hang"}}.items():
            await bench.init(rollout_id, **row)
        await bench.start_init("e", init="hang")
        await bench.coordinator.order(StartRun("b", SERVER, PATIENCE_S))
        run_c, _ = await bench.run("c"), await bench.run("d")
        await bench.coordinator.order(StartEval("d", PATIENCE_S))
        held = await hello_again(bench)
        stages = {name: [report.stage for report in each.reports] for name, each in held.items()}
        assert stages == {
            "a": [Stage.INIT],
            "b": [Stage.INIT],
            "c": [Stage.INIT, Stage.RUN],
            "d": [Stage.INIT, Stage.RUN],
            "e": [],
        }
        assert {name: (each.running, each.server) for name, each in held.items()} == {
            "a": (None, None),
            "b": (Stage.RUN, SERVER),
            "c": (None, None),
            "d": (Stage.EVAL, None),
            "e": (Stage.INIT, None),
        }
        assert held["c"].reports[1] == run_c

    async def test_last_reports_are_in_it_until_they_are_acknowledged(self, bench: Bench) -> None:
        bench.coordinator.acknowledges = False
        await bench.init("ok")
        await bench.run("ok")
        scored = await bench.eval("ok")
        broken = await bench.init("broken", init="sandbox")
        held = await hello_again(bench)
        assert held["ok"].reports[-1] == scored
        assert held["broken"] == Held("broken", [broken])
        await bench.until_no_sandbox_runs()
        await bench.coordinator.order(Acknowledge(["ok"]))
        await held_is(bench, "broken")
        await bench.coordinator.order(Acknowledge(["broken", "never-heard-of"]))
        await held_is(bench)

    async def test_a_report_that_waits_to_be_sent_is_said_once(self, bench: Bench) -> None:
        """It goes with the Hello, and not by itself as well."""
        worker = bench.worker
        worker._outbox.say(StageFinished("worker-0", "r1", Stage.INIT))
        worker._outbox.say(Discarded("worker-0", "r2"))
        worker._hello()
        assert worker._outbox.take() == [Discarded("worker-0", "r2")]


class TestDiscard:
    def test_the_patiences_leave_room_within_a_second(self) -> None:
        assert stages._CANCEL_PATIENCE_S + stages._STOP_PATIENCE_S <= 0.8

    async def test_an_unacknowledged_report_is_dropped_and_its_trajectory_given(self, bench: Bench) -> None:
        bench.coordinator.acknowledges = False
        await bench.init("r1", run="inference")
        await bench.run("r1")
        await bench.coordinator.order(Discard("r1"))
        trajectory = trajectory_of(await bench.coordinator.expect(Discarded))
        assert trajectory is not None and trajectory.num_trained_tokens > 0
        await held_is(bench)

    async def test_the_partial_trajectory_of_a_run_that_hangs(self, bench: Bench) -> None:
        await bench.init("r1", run="hang")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.until(lambda: bench.llms.answered_by)
        await asyncio.sleep(0.05)
        await bench.coordinator.order(Discard("r1"))
        trajectory = trajectory_of(await bench.coordinator.expect(Discarded))
        assert trajectory is not None and trajectory.num_trained_tokens > 0

    @pytest.mark.parametrize("stage", list(Stage))
    async def test_code_that_never_gives_up_does_not_delay_the_answer(self, bench: Bench, stage: Stage) -> None:
        row = {stage.value: "immortal"}
        if stage is Stage.INIT:
            await bench.start_init("r1", **row)
        else:
            await bench.init("r1", **row)
            if stage is Stage.EVAL:
                await bench.run("r1")
            order = StartRun("r1", SERVER, PATIENCE_S) if stage is Stage.RUN else StartEval("r1", PATIENCE_S)
            await bench.coordinator.order(order)
        await bench.until_a_sandbox_runs()
        await asyncio.sleep(0.1)
        await bench.coordinator.order(Discard("r1"))
        await bench.coordinator.expect(Discarded)
        assert bench.sandboxes == []
        assert not staged_task.mortal.is_set()

    async def test_a_sandbox_that_stops_slowly_does_not_delay_the_answer(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await bench.init("r1")
        [sandbox] = bench.runtime.started
        stop, gate = sandbox.stop, asyncio.Event()

        async def slow_stop() -> None:
            await gate.wait()
            await stop()

        monkeypatch.setattr(sandbox, "stop", slow_stop)
        await bench.coordinator.order(Discard("r1"))
        await bench.coordinator.expect(Discarded)
        assert (await bench.coordinator.expect(WorkerLoad)).sandboxes == 1
        gate.set()
        await bench.until_no_sandbox_runs()


class TestMoves:
    async def test_a_run_moves_when_its_server_does_not_answer(self, bench: Bench) -> None:
        bench.llms.down.add("server-0")
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        trouble = await bench.coordinator.expect(ServerTrouble)
        assert trouble == ServerTrouble("worker-0", "r1", "server-0", "does not answer")
        await bench.coordinator.order(MoveRun("r1", OTHER))
        assert (await bench.coordinator.expect(StageFinished)).failure is None
        assert bench.llms.answered_by == ["server-1"]

    async def test_the_new_server_is_in_the_next_hello(self, bench: Bench) -> None:
        await bench.init("r1", run="hang")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.coordinator.order(MoveRun("r1", OTHER))
        held = await hello_again(bench)
        assert held["r1"].server == OTHER

    async def test_a_move_to_nowhere_fails_the_run(self, bench: Bench) -> None:
        bench.llms.down.add("server-0")
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.coordinator.expect(ServerTrouble)
        await bench.coordinator.order(MoveRun("r1", None))
        failure = (await bench.coordinator.expect(StageFinished)).failure
        assert failure is not None and failure.kind is FailureKind.INFERENCE

    @pytest.mark.parametrize("server", [OTHER, None])
    async def test_a_move_right_behind_the_order_to_run(self, bench: Bench, server: ServerRef | None) -> None:
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S), MoveRun("r1", server))
        done = await bench.coordinator.expect(StageFinished)
        assert (done.failure is None) == (server is not None)
        assert bench.llms.answered_by in ([], ["server-1"])

    async def test_a_move_of_what_does_not_run_changes_nothing(self, bench: Bench) -> None:
        await bench.init("r1")
        await bench.coordinator.order(MoveRun("r1", OTHER), MoveRun("never-heard-of", None))
        assert (await bench.run("r1")).failure is None
        assert bench.llms.answered_by == ["server-0"]


class TestRetry:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.when_server_lost = "retry"
        return config

    async def test_a_server_that_does_not_answer_fails_the_run_at_once(self, bench: Bench) -> None:
        bench.llms.down.add("server-0")
        await bench.init("r1")
        failure = (await bench.run("r1")).failure
        assert failure is not None and failure.kind is FailureKind.INFERENCE


class TestDraining:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.drain_s = 30.0
        return config

    async def test_what_runs_ends_and_is_scored_before_goodbye(self, bench: Bench) -> None:
        bench.coordinator.acknowledges = False
        await bench.init("idle")
        bench.llms.down.add("server-0")
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.coordinator.expect(ServerTrouble)
        bench.stop.set()
        assert await bench.coordinator.expect(Draining) == Draining("worker-0")
        await bench.coordinator.order(MoveRun("r1", OTHER))
        assert (await bench.coordinator.expect(StageFinished)).stage is Stage.RUN
        assert (await bench.eval("r1")).reward == 0.5
        assert not bench.running.done()
        await bench.coordinator.order(Acknowledge(["r1"]))
        assert await bench.coordinator.expect(Goodbye) == Goodbye("worker-0")
        async with asyncio.timeout(PATIENCE_S):
            assert await bench.running == "told to stop"
        assert bench.sandboxes == []

    async def test_a_coordinator_that_was_started_anew_hears_of_it(self, bench: Bench) -> None:
        await bench.init("r1", run="hang")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.until(lambda: bench.llms.answered_by)
        bench.stop.set()
        await bench.coordinator.expect(Draining)
        await hello_again(bench)
        await bench.coordinator.expect(Draining)
        await bench.coordinator.order(Shutdown("enough"))

    async def test_a_shutdown_waits_for_nothing(self, bench: Bench) -> None:
        await bench.init("r1", run="hang")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.until(lambda: bench.llms.answered_by)
        bench.stop.set()
        await bench.coordinator.expect(Draining)
        await bench.coordinator.order(Shutdown("enough"))
        async with asyncio.timeout(PATIENCE_S):
            assert await bench.running == "the coordinator ends the run: enough"
        assert bench.sandboxes == []


async def test_what_does_not_end_while_draining_is_given_up(bench: Bench) -> None:
    await bench.init("r1", run="hang")
    await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
    bench.stop.set()
    await bench.coordinator.expect(Draining)
    await bench.coordinator.expect(Goodbye)
    async with asyncio.timeout(PATIENCE_S):
        await bench.running
    assert bench.sandboxes == []


class TestFreshSandbox:
    async def test_eval_gets_a_new_sandbox_where_the_task_asks(self, bench: Bench) -> None:
        await bench.init("r1")
        await bench.run("r1")
        await bench.until_no_sandbox_runs()
        assert (await bench.eval("r1")).metrics == {"files": 0.0, "answer": 5.0}
        await bench.until_no_sandbox_runs()
        assert len(bench.runtime.started) == 2

    async def test_a_fresh_sandbox_that_does_not_start_fails_eval(self, bench: Bench) -> None:
        await bench.init("r1")
        await bench.run("r1")
        bench.runtime.fail_starts = 1
        failure = (await bench.eval("r1")).failure
        assert failure is not None and (failure.stage, failure.kind) == (Stage.EVAL, FailureKind.SANDBOX)

    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.task.name = "staged_task:FreshTask"
        return config


class TestATaskThatSaysWhatItsSandboxesNeed:
    async def test_every_sandbox_of_the_row_gets_it(self, bench: Bench) -> None:
        await bench.init("r1", image="py.sif")
        await bench.run("r1")
        await bench.eval("r1")
        assert len(bench.runtime.started) == 2
        for sandbox in bench.runtime.started:
            spec = sandbox.spec
            assert (spec.image, spec.network, spec.env) == ("py.sif", "host", {"ROW": "r1"})

    async def test_a_mistake_in_it_is_the_tasks(self, bench: Bench) -> None:
        failure = (await bench.init("r1")).failure
        assert failure is not None and (failure.kind, failure.message) == (FailureKind.TASK, "KeyError: 'image'")

    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.task.name = "staged_task:NeedyTask"
        return config


async def test_an_order_for_a_stage_that_is_done_repeats_its_report(bench: Bench) -> None:
    await bench.init("r1")
    done = await bench.run("r1")
    assert await bench.run("r1") == done
    assert len(bench.llms.answered_by) == 1


async def test_a_coordinator_that_comes_back_at_its_endpoint_finds_everything(
    bench: Bench, keys: RunKeys, tmp_path: Path
) -> None:
    bench.coordinator.acknowledges = False
    await bench.init("r1")
    await bench.run("r1")
    await bench.init("broken", init="task")
    await bench.coordinator.close()
    bench.coordinator = FakeCoordinator(keys, tmp_path / "c.sock", 0.05)
    held = {each.rollout_id: each for each in (await bench.coordinator.expect(WorkerHello)).held}
    assert [report.stage for report in held["r1"].reports] == [Stage.INIT, Stage.RUN]
    assert held["broken"].reports[-1].failure is not None
    assert (await bench.eval("r1")).failure is None
