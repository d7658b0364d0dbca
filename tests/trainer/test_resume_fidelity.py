"""A run that crashed, was stopped and was resumed each time has the figures of one that was not interrupted, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from fake_rollouts import FakeRollouts
from test_training_loop import a_loop, new_run

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.trainer import checkpoint
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.random_state import random_state, set_random_state
from prorl_hpc.trainer.stopping import Stopped

pytestmark = pytest.mark.train

TIMES = {"time", "seconds", "generation_s", "idle_fraction"}
ALGORITHMS = {
    "dapo": {},
    "ppo": {"advantage": "gae", "proximal": "trainer", "mini_batches": 2, "epochs": 2, "dynamic_sampling": False},
}


def figures(run: RunDirectory) -> list[dict[str, Any]]:
    """All that is written of steps and evaluations, but what a clock says."""
    records = MetricsLog(run.metrics_file).read()
    newest = [record for kind in ("step", "eval") for record in newest_per_step(records, kind)]
    return [{k: v for k, v in r.items() if k not in TIMES and not k.endswith("_per_s")} for r in newest]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_the_resumed_curve_is_the_uninterrupted_one(
    tmp_path, tiny_model, monkeypatch, commands, algorithm, stage
):
    settings = {"steps": 4, "zero_stage": stage, "checkpoint_every": 2, "eval_every": 2} | ALGORITHMS[algorithm]
    whole = new_run(tmp_path, tiny_model, **settings)
    async with a_loop(whole, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        await loop.run()

    run, service = new_run(tmp_path, tiny_model, **settings), FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:

        def stop(batch_id: str) -> None:
            if batch_id == "step-2":
                loop.stop.request()

        service.on_wait = stop
        with pytest.raises(Stopped):
            await loop.run()
    async with a_loop(run, service, monkeypatch, commands) as loop:
        assert loop.position.step == 1

        def crash(batch_id: str) -> None:
            if batch_id == "step-4":
                raise RuntimeError("a node failed")

        service.on_wait = crash
        with pytest.raises(RuntimeError):
            await loop.run()
    service.on_wait = lambda batch_id: None
    async with a_loop(run, service, monkeypatch, commands) as loop:
        assert loop.position.step == 2, "step 3 was trained and not saved"
        await loop.run()

    assert figures(run) == figures(whole)
    assert len(figures(run)) == 7
    saved = [(r.checkpoints / "step-4" / "model.safetensors").read_bytes() for r in (run, whole)]
    assert saved[0] == saved[1]
    extra = [torch.load(r.checkpoints / "step-4" / "trainer_state" / "extra.pt") for r in (run, whole)]
    assert bool(extra[0]) is (algorithm == "ppo") and extra[0].keys() == extra[1].keys()
    assert all(torch.equal(tensor, extra[1][name]) for name, tensor in extra[0].items())
    prompts = [[row["id"] for row in service.specs[f"step-{n}"].rows[:2]] for n in (1, 2, 3, 4)]
    assert len({id for batch in prompts for id in batch}) == 8, "none is skipped or repeated"


def test_every_generator_goes_on_where_it_was():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(1))

    state = random_state()
    expected = [draw() for _ in range(3)]
    set_random_state(state)
    assert [draw() for _ in range(3)] == expected


def test_the_state_says_whose_it_is_and_where_it_stands(make_engine, tiny_model, tmp_path):
    checkpoint.save(make_engine(), tmp_path, tiny_model, Position(4, 9), run_id="run-1", keep=1)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    state = newest.state
    assert (state.run_id, state.position, state.weight_version) == ("run-1", Position(4, 9), 5)
