from __future__ import annotations

import pytest
from fake_rollouts import FakeRollouts
from test_training_loop import a_loop, new_run

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.trainer import best_model
from prorl_hpc.trainer.heldout_set import HeldOutSet
from prorl_hpc.trainer.orders import evaluation_order


def test_two_evaluations_are_alike_where_rows_samples_and_sampling_are() -> None:
    config, rows = ProrlConfig(), [{"number": 1}, {"number": 2}]

    def of(step: int, rows: list[dict[str, int]]) -> HeldOutSet:
        return HeldOutSet.of(evaluation_order(config, step, rows))

    first = of(0, rows)
    assert first == of(7, rows)
    assert first != of(7, rows[::-1]) and first != of(7, rows[:1])
    for name, value in (("eval_samples", 4), ("eval_temperature", 0.5)):
        setattr(config.trainer, name, value)
        assert of(7, rows) != first
        config = ProrlConfig()
    config.task.name = "another"
    assert of(7, rows) != first


@pytest.mark.train
async def test_another_held_out_set_at_a_resume_starts_the_search_for_the_best_anew(
    tmp_path, tiny_model, monkeypatch, commands
):
    settings = {"checkpoint_every": 1, "eval_every": 1}
    run = new_run(tmp_path, tiny_model, steps=2, eval_prompts=2, **settings)
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    before = best_model.best(run.checkpoints)
    assert before is not None and before.held_out.prompts == 2

    config = run.load_config()
    config.trainer.steps, config.trainer.eval_prompts = 3, 1
    monkeypatch.setattr(type(run), "load_config", lambda self: config)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
    now = best_model.best(run.checkpoints)
    assert now is not None and (now.step, now.held_out.prompts) == (3, 1)
    evals = newest_per_step(MetricsLog(run.metrics_file).read(), "eval")
    assert [record["held_out"]["prompts"] for record in evals] == [2, 2, 2, 1]
    status = read_json(run.trainer_status_file, TrainerStatus)
    assert status is not None and status.heldout_start is None and status.heldout_last == evals[-1]["reward"]
