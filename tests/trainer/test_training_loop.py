"""The loop with the real engine on a tiny model, and a fake service that samples from the published weights."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from threading import Timer

import msgspec
import pytest
from fake_rollouts import FakeRollouts

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.messages.batch import GroupFilter, WhenFull
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.trainer import checkpoint
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.crew import Crew, Rank
from prorl_hpc.trainer.loop import TrainingLoop
from prorl_hpc.trainer.metric_writers import open_writers
from prorl_hpc.trainer.prompts import PromptOrder
from prorl_hpc.trainer.publish import probe_tokens
from prorl_hpc.trainer.publisher import make_publisher
from prorl_hpc.trainer.stopping import Stopped, StopSignal

pytestmark = pytest.mark.train
ROWS = [{"id": f"r{i}", "number": i} for i in range(10)]


def new_run(root: Path, model: Path, **trainer) -> RunDirectory:
    defaults = {
        "steps": 3,
        "groups_per_step": 2,
        "group_size": 4,
        "max_rows_per_step": 6,
        "eval_prompts": 4,
        "checkpoint_every": 2,
        "learning_rate": 1e-3,
        "threads": 1,
        "dtype": "float32",
    }
    config = ProrlConfig(
        run=RunSettings(root=str(root)),
        model=ModelConfig(path=str(model)),
        trainer=TrainerConfig(**(defaults | trainer)),
    )
    return RunDirectory.create(config)


@asynccontextmanager
async def a_loop(run: RunDirectory, service: FakeRollouts, monkeypatch, commands):
    """A TrainingLoop on the test session's own process group."""
    monkeypatch.setattr("prorl_hpc.trainer.crew.join", lambda *a, **k: commands)
    monkeypatch.setattr("prorl_hpc.trainer.crew.dist.destroy_process_group", lambda: None)
    config, stop, crew = run.load_config(), StopSignal(), Crew()
    rank = await crew.load(lambda: Rank(config, run, stop, rank=0, world=1, host="127.0.0.1"))
    way, size = config.trainer.publish, rank.engine.weight_bytes
    publisher = make_publisher(way, crew, run, host="127.0.0.1", single_node=True, weight_bytes=size)
    with open_writers(config, run) as writers:
        yield TrainingLoop(
            config,
            run,
            service,
            crew,
            stop,
            publisher,
            writers,
            train_rows=ROWS,
            heldout_rows=[{"id": f"h{i}", "number": 20 + i} for i in range(6)],
            probe_ids=probe_tokens(Path(config.model.path)),
            position=rank.position,
        )
    await crew.close()
    publisher.close()


async def test_without_prompts_of_its_own_nothing_is_evaluated(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, eval_prompts=0, steps=1)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    assert list(service.specs) == ["step-1"]
    assert not (run.checkpoints / "best").exists()


async def test_a_whole_run(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, eval_every=2)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
        assert loop.position.step == 3

    assert list(service.specs) == ["eval-0", "step-1", "step-2", "eval-2", "step-3", "eval-3"]
    spec = service.specs["step-1"]
    assert (spec.groups_wanted, spec.group_size, len(spec.rows), spec.filter) == (2, 4, 6, GroupFilter.INFORMATIVE)
    held = service.specs["eval-0"]
    assert (held.groups_wanted, len(held.rows), held.filter, held.min_usable_samples) == (4, 4, GroupFilter.ALL, 1)
    assert [u.version for u in service.updates] == [1, 2, 3, 4]

    records = MetricsLog(run.metrics_file).read()
    steps, evals = newest_per_step(records, "step"), newest_per_step(records, "eval")
    assert [r["step"] for r in steps] == [1, 2, 3] and [r["step"] for r in evals] == [0, 2, 3]
    for record in steps:
        # On policy, and the fake engine computes in float32 as we do.
        assert record["ratio"] == pytest.approx(1.0, abs=1e-4)
        assert 0 < record["logprob_gap_mean"] <= record["logprob_gap_max"] < 1e-4 and record["probe_gap"] < 1e-4
        assert record["clip_fraction"] == 0.0 and record["staleness"] == 0.0
        assert record["weight_version"] == record["step"] + 1
        # By chance all samples of a group may earn the same; such a group is counted and not trained on.
        assert record["groups_accepted"] >= 1 and record["groups_accepted"] + record["groups_uniform"] == 2
        assert record["rollouts"] == 8 and record["tokens_generated"] == 48
        assert record["tokens_trained"] == 24 * record["groups_accepted"]
        assert record["seconds"].keys() >= {"rollouts", "training", "publishing", "total"}
        assert record["grad_norm"] > 0 and record["entropy"] > 0 and record["learning_rate"] == 1e-3
    assert "saving" in steps[1]["seconds"] and "saving" not in steps[0]["seconds"]
    assert evals[0]["rollouts"] == 4 and 0 <= evals[0]["reward"] <= 1

    assert [p.name for p in checkpoint.all_checkpoints(run.checkpoints)] == ["step-2", "step-3"]
    status = read_json(run.trainer_status_file, TrainerStatus)
    assert status is not None and (status.phase, status.step, status.steps) == ("done", 3, 3)
    assert status.heldout_start == evals[0]["reward"] and status.heldout_last == evals[-1]["reward"]
    assert list(run.tensorboard.glob("events*"))


async def test_the_reward_rises(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(
        tmp_path, tiny_model, steps=20, groups_per_step=4, group_size=8, learning_rate=5e-3, checkpoint_every=99
    )
    async with a_loop(run, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        await loop.run()
    rewards = [r["reward"] for r in newest_per_step(MetricsLog(run.metrics_file).read(), "step")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


async def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_model, monkeypatch, commands):
    whole = new_run(tmp_path, tiny_model, steps=4)
    async with a_loop(whole, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        await loop.run()

    cut = new_run(tmp_path, tiny_model, steps=4)
    service = FakeRollouts(tiny_model)
    async with a_loop(cut, service, monkeypatch, commands) as loop:
        service.on_wait = lambda batch: loop.stop.request() if batch == "step-3" else None
        with pytest.raises(Stopped):
            await loop.run()
    service.on_wait = lambda batch: None
    async with a_loop(cut, service, monkeypatch, commands) as loop:
        assert loop.position == Position(2, 4)
        await loop.run()  # the service refuses an order that differs
    assert service.made.count("step-3") == 1
    assert_alike(cut, whole)


def assert_alike(ours: RunDirectory, theirs: RunDirectory) -> None:
    """Figures and weights of two runs of four steps."""

    def figures(run: RunDirectory):
        records = MetricsLog(run.metrics_file).read()
        return [
            (r["step"], r["kind"], r["reward"], r.get("loss"), r.get("grad_norm"))
            for kind in ("step", "eval")
            for r in newest_per_step(records, kind)
        ]

    assert figures(ours) == figures(theirs)
    weights = [(run.checkpoints / "step-4" / "model.safetensors").read_bytes() for run in (ours, theirs)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("when_full", ["cancel", "carry"])
async def test_steps_behind_the_checkpoint_are_trained_again_from_what_was_recorded(
    tmp_path, tiny_model, monkeypatch, commands, when_full
):
    carry = {"when_full": when_full, "staleness": int(when_full == "carry")}
    whole = new_run(tmp_path, tiny_model, steps=4, **carry)
    async with a_loop(whole, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        await loop.run()

    run = new_run(tmp_path, tiny_model, steps=4, checkpoint_every=99, **carry)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:

        def crash(batch_id: str) -> None:
            if batch_id == "step-4":
                raise RuntimeError("out of memory")

        service.on_wait = crash
        with pytest.raises(RuntimeError):
            await loop.run()
    assert checkpoint.latest(run.checkpoints) is None
    service.on_wait = lambda batch_id: None
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    assert service.made == ["eval-0", "step-1", "step-2", "step-3", "step-4", "eval-4"]
    assert_alike(run, whole)


async def test_the_pace_is_that_of_whole_steps_of_this_attempt(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, steps=5, checkpoint_every=99)
    service = FakeRollouts(tiny_model)
    told: dict[str, bool] = {}
    crash = "step-4"

    def look(batch_id: str) -> None:
        status = read_json(run.trainer_status_file, TrainerStatus)
        assert status is not None
        told[batch_id] = status.eta_s is not None
        if batch_id == crash:
            raise RuntimeError("out of memory")

    service.on_wait = look
    async with a_loop(run, service, monkeypatch, commands) as loop:
        with pytest.raises(RuntimeError):
            await loop.run()
    assert told == {"eval-0": False, "step-1": False, "step-2": False, "step-3": True, "step-4": True}
    told.clear()
    crash = ""
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    assert not any(told[f"step-{number}"] for number in range(1, 6))  # three were there at once, one is too few
    assert told["eval-5"]


async def test_an_evaluation_that_was_left_off_is_ended_before_the_next_step(
    tmp_path, tiny_model, monkeypatch, commands
):
    run = new_run(tmp_path, tiny_model, eval_every=1)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        service.on_wait = lambda batch: loop.stop.request() if batch == "eval-1" else None
        with pytest.raises(Stopped):
            await loop.run()
        assert loop.position.step == 1
    service.on_wait = lambda batch: None
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    evals = [r["step"] for r in MetricsLog(run.metrics_file).read() if r["kind"] == "eval"]
    assert evals == [0, 1, 2, 3]


async def test_an_order_that_was_changed_since_says_how_to_go_on(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        service.on_wait = lambda batch: loop.stop.request() if batch == "step-1" else None
        with pytest.raises(Stopped):
            await loop.run()
    service.specs["step-1"] = msgspec.structs.replace(service.specs["step-1"], group_size=8)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        with pytest.raises(RunError, match=rf"step-1 .* were changed since.*prorl-hpc resume --fresh {run.path}"):
            await loop.run()


async def test_a_stop_while_rollouts_run_leaves_them_and_a_checkpoint(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model)
    service = FakeRollouts(tiny_model)
    service.hang = True
    async with a_loop(run, service, monkeypatch, commands) as loop:
        service.on_wait = lambda batch: loop.stop.request()
        with pytest.raises(Stopped):
            await loop.run()
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None and newest.state.position == Position(0, 0)


async def test_a_stop_in_the_middle_of_training_keeps_the_last_complete_step(
    tmp_path, tiny_model, monkeypatch, commands
):
    run = new_run(tmp_path, tiny_model, checkpoint_every=99)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        backward = loop.crew._rank.engine._deepspeed.backward

        def stop_in_step_2(loss):
            if loop.position.step == 1:
                loop.stop.request()
            return backward(loss)

        loop.crew._rank.engine._deepspeed.backward = stop_in_step_2
        with pytest.raises(Stopped):
            await loop.run()
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None and newest.state.position == Position(1, 2)
    assert [r["step"] for r in newest_per_step(MetricsLog(run.metrics_file).read(), "step")] == [1]


async def test_a_batch_without_an_informative_group_keeps_the_weights(
    tmp_path, tiny_model, monkeypatch, commands, caplog
):
    run = new_run(tmp_path, tiny_model)
    service = FakeRollouts(tiny_model, uniform=frozenset({"step-2"}))
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    assert "step 2: no group to learn from (2 uniform" in caplog.text
    assert [u.version for u in service.updates] == [1, 2, 3, 4], "a version is that of a step"
    record = newest_per_step(MetricsLog(run.metrics_file).read(), "step")[1]
    assert "loss" not in record and record["weight_version"] == 3 and record["groups_uniform"] == 2
    # The next step does not see the same prompts again.
    assert service.specs["step-3"].rows[0] not in service.specs["step-2"].rows[:2]


async def test_groups_that_a_step_carries_on_are_trained_on_in_the_next(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, when_full="carry", staleness=1)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
        assert loop.position == Position(3, 7)  # 3, 2 and 2 prompts: a group taken over is none of the step's own rows
    assert service.specs["step-1"].when_full is WhenFull.CARRY
    assert service.specs["eval-0"].when_full is WhenFull.CANCEL
    assert {spec.client for spec in service.specs.values()} == {"trainer"}
    order = PromptOrder(ROWS, 0)
    assert [service.specs[f"step-{n}"].rows[0] for n in (1, 2, 3)] == [order.take(k, 1)[0] for k in (0, 3, 5)]
    first, second, third = newest_per_step(MetricsLog(run.metrics_file).read(), "step")
    for record in (first, second, third):
        assert record["rollouts"] == 8, "what is carried on is counted where it ends"
        assert record["groups_carried"] == 1
    assert first["staleness"] == 0.0
    assert any(0 < record["staleness"] <= 0.75 for record in (second, third)), "one group is a version older"


async def test_servers_that_do_not_serve_the_new_weights_end_the_run(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model)
    service = FakeRollouts(tiny_model)
    service.gap = 0.3
    async with a_loop(run, service, monkeypatch, commands) as loop:
        with pytest.raises(RunError, match="inference-0 says that it loaded them"):
            await loop.run()


@pytest.mark.parametrize("told", [True, False])
async def test_a_coordinator_that_was_told_to_end_first(tmp_path, tiny_model, monkeypatch, commands, told):
    monkeypatch.setattr("prorl_hpc.trainer.loop.TOLD_TOO_S", 60.0 if told else 0.1)
    run = new_run(tmp_path, tiny_model, checkpoint_every=99)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:

        def leave(batch):
            if batch == "step-2":
                if told:
                    Timer(0.2, loop.stop.request).start()
                raise ServiceError("the rollout service is shutting down", code="shutting_down", status=503)

        service.on_wait = leave
        with pytest.raises(Stopped if told else ServiceError):
            await loop.run()
    newest = checkpoint.latest(run.checkpoints)
    assert (newest is not None) is told
    assert newest is None or newest.state.position.step == 1
