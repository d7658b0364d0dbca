"""A loss or gradient that is no finite number never reaches the weights, whatever the ZeRO stage."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from trainer_samples import training_samples

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer import engine as engine_module
from prorl_hpc.trainer.skipped_updates import SkippedUpdates

pytestmark = pytest.mark.train
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (0, "bfloat16"), (1, "bfloat16")]
STAGES += [(2, "bfloat16"), (3, "bfloat16")]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``spoil(times, loss, gradient)``: the next losses, and what their gradient is multiplied by."""
    whole = engine_module.training_loss

    def begin(times: int, gradient: float = 1.0, loss: float | None = None) -> None:
        left = [times]

        def spoilt(*arguments):
            found, sums = whole(*arguments)
            left[0] -= 1
            if left[0] < 0:
                return found, sums
            sums.loss = sums.loss if loss is None else loss
            return found * gradient, sums

        monkeypatch.setattr(engine_module, "training_loss", spoilt)

    return begin


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_gradient_that_is_not_finite_changes_nothing(make_engine, spoil, caplog, stage, dtype):
    settings = {"zero_stage": stage, "dtype": dtype, "micro_batch_tokens": 60}
    engine, plain = make_engine(**settings), make_engine(**settings)
    before = weights(engine)
    spoil(1, math.nan)
    outcome = engine.train(training_samples(settings=engine.config), 1e-3)
    assert outcome.metrics["updates_skipped"] == 1 and outcome.metrics["optimizer_steps"] == 0
    assert not {"loss", "grad_norm"} & outcome.metrics.keys(), "they are no numbers"
    assert "1 of 1 updates of this step skipped" in caplog.text and "learning rate 0.001" in caplog.text
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)

    # The next step is that of an engine that never saw it.
    good = engine.train(training_samples(settings=engine.config), 1e-3).metrics
    assert good == plain.train(training_samples(settings=engine.config), 1e-3).metrics
    assert good["updates_skipped"] == 0 and good["optimizer_steps"] == 1
    torch.testing.assert_close(weights(engine), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_that_is_not_finite_skips_the_update_though_its_gradient_is(make_engine, spoil, stage):
    engine = make_engine(zero_stage=stage, micro_batch_tokens=60)
    before = weights(engine)
    spoil(1, loss=math.inf)
    assert engine.train(training_samples(settings=engine.config), 1e-3).metrics["updates_skipped"] == 1
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "all")])
def test_with_offload_too(make_engine, spoil, stage, offload):
    engine = make_engine(zero_stage=stage, offload=offload)
    before = weights(engine)
    spoil(1, math.inf)
    assert engine.train(training_samples(settings=engine.config), 1e-3).metrics["updates_skipped"] == 1
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
    assert engine.train(training_samples(settings=engine.config), 1e-3).metrics["optimizer_steps"] == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_the_other_updates_of_a_step_are_made_and_told(make_engine, spoil, stage):
    engine = make_engine(zero_stage=stage, epochs=3, proximal="trainer")
    spoil(1, math.nan)
    metrics = engine.train(training_samples(settings=engine.config), 1e-3).metrics
    assert (metrics["updates_skipped"], metrics["optimizer_steps"]) == (1, 2)
    assert all(math.isfinite(x) for x in metrics.values()) and metrics["grad_norm"] > 0


@pytest.mark.parametrize("stage", [0, 1])
def test_three_steps_without_an_update_end_the_run(make_engine, spoil, stage):
    engine = make_engine(zero_stage=stage)
    batch = training_samples(settings=engine.config)
    engine.train(batch, 1e-3)
    before = weights(engine)
    spoil(3, math.nan)
    engine.train(batch, 1e-3)
    engine.train(batch, 1e-3)
    with pytest.raises(RunError, match=r"every update of the last 3 steps was skipped.*trainer\.learning_rate"):
        engine.train(batch, 1e-3)
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)


def test_a_step_with_an_update_begins_the_count_anew():
    skipped = SkippedUpdates(TrainerConfig())
    for left_out in (2, 2, 1, 2, 2, 0, 2, 2):
        skipped.count(left_out, 2, 1e-3, math.nan)
    with pytest.raises(RunError):
        skipped.count(2, 2, 1e-3, math.nan)


def test_all_ranks_skip_what_one_cannot_make(tiny_model, tmp_path):
    file = __file__.replace("test_skipped_updates.py", "two_ranks_skipping.py")
    words = [sys.executable, file, str(tiny_model), str(tmp_path)]
    ranks = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
