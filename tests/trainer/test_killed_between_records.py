"""What a kill between a checkpoint, the line of its step, an evaluation and the best model leaves to whoever resumes."""

from __future__ import annotations

import pytest
from fake_rollouts import FakeRollouts
from test_training_loop import a_loop, new_run

from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.trainer.best_model import best
from prorl_hpc.trainer.crew import Crew

pytestmark = pytest.mark.train


class Killed(BaseException):
    """Passes every ``except Exception``, as SIGKILL does; what was done before it stands."""


async def test_the_line_of_a_step_that_was_saved_is_made_up_for(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, checkpoint_every=1)
    service = FakeRollouts(tiny_model)
    append = MetricsLog.append

    dead = False

    def killed_before_step_2(self, record):
        nonlocal dead
        if dead:
            return  # whatever tidies up here would not run
        if (record["kind"], record["step"]) == ("step", 2):
            dead = True
            raise Killed
        append(self, record)

    with monkeypatch.context() as broken:
        broken.setattr(MetricsLog, "append", killed_before_step_2)
        async with a_loop(run, service, monkeypatch, commands) as loop:
            with pytest.raises(Killed):
                await loop.run()
    for _ in range(2):  # once, however often it is resumed
        async with a_loop(run, service, monkeypatch, commands) as loop:
            assert loop.position.step >= 2
            await loop.run()
    lines = [record for record in MetricsLog(run.metrics_file).read() if record["kind"] == "step"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1].keys() >= lines[0].keys() - {"tokens_trained", "staleness", "loss"}
    assert lines[1]["weight_version"] == 3 and lines[1]["seconds"].keys() >= {"rollouts", "publishing", "total"}


async def test_a_model_whose_evaluation_was_cut_off_still_becomes_the_best(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, steps=1, checkpoint_every=1)
    service = FakeRollouts(tiny_model)

    async def killed(self, new):
        if new.step:
            raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(Crew, "keep_best", killed)
        async with a_loop(run, service, monkeypatch, commands) as loop:
            with pytest.raises(Killed):
                await loop.run()
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    kept = best(run.checkpoints)
    assert kept is not None and kept.step == 1
    evaluations = [record["step"] for record in MetricsLog(run.metrics_file).read() if record["kind"] == "eval"]
    assert evaluations == [0, 1]
