"""Offload, the user's own DeepSpeed settings, value head and memory that ends, with real DeepSpeed."""

from __future__ import annotations

import json
import re

import pytest
import torch
from plain_step import LEARNING_RATE, config_of
from trainer_samples import training_samples
from two_ranks import momenta

from prorl_hpc.config.deepspeed_optimizers import OPTIMIZERS
from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.trainer import out_of_memory
from prorl_hpc.trainer.stopping import Stopped, StopSignal

pytestmark = pytest.mark.train


def stepped(make_engine, steps: int = 1, **settings):
    engine = make_engine(**settings)
    for _ in range(steps):
        engine.train(training_samples(settings=engine.config), 1e-3)
    return engine


def copied(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()} | engine.extra_state()


@pytest.mark.parametrize(("offload", "stage"), [("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("all", 3)])
def test_offload_makes_the_same_step(make_engine, offload, stage):
    config = {"zero_stage": stage, "advantage": "gae", "mini_batches": 3, "micro_batch_tokens": 60}
    plain = stepped(make_engine, **config)
    offloaded = stepped(make_engine, **config, offload=offload)
    assert offloaded._deepspeed.zero_use_cpu_optimizer() and not plain._deepspeed.zero_use_cpu_optimizer()
    torch.testing.assert_close(copied(offloaded), copied(plain), rtol=1e-4, atol=1e-5)


def test_a_json_of_ones_own_takes_effect(make_engine, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"reduce_bucket_size": 1234567}}))
    engine = make_engine(deepspeed_file=str(file), deepspeed={"optimizer": {"type": "SGD"}}, zero_stage=2)
    assert engine._deepspeed.optimizer.reduce_bucket_size == 1234567
    assert isinstance(engine._deepspeed.basic_optimizer, torch.optim.SGD)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_that_is_let_through_trains_and_resumes(make_engine, kind, stage):
    settings = {"deepspeed": {"optimizer": {"type": kind}}, "zero_stage": stage, "max_grad_norm": 1.0}
    engine = stepped(make_engine, **settings)
    assert type(engine._deepspeed.basic_optimizer).__module__.startswith("torch.optim")
    resumed = make_engine(**settings)
    resumed.load_optimizer_state(engine.optimizer_state())
    assert resumed.train(training_samples(settings=engine.config), 1e-3).metrics["optimizer_steps"] == 1


def test_a_json_that_would_be_ignored_stops_the_start(make_engine):
    with pytest.raises(
        ConfigError, match=r"trainer\.deepspeed: 'zero_optimisation' would be ignored; did you mean 'zero_optim"
    ):
        make_engine(deepspeed={"zero_optimisation": {"stage": 2}})


def test_a_section_that_deepspeed_refuses_is_told_in_words(make_engine):
    with pytest.raises(ConfigError, match="reduce_bucket"):
        make_engine(deepspeed={"zero_optimization": {"reduce_bucket": 5}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_value_head_is_kept_with_the_optimizer_and_not_in_the_model(make_engine, stage):
    settings = {"advantage": "gae", "zero_stage": stage, "value_learning_rate": 1e-2}
    engine = stepped(make_engine, 2, **settings)
    extra = {name: tensor.clone() for name, tensor in engine.extra_state().items()}
    assert extra.keys() == {"value_head.weight", "value_head.bias"} and extra["value_head.weight"].abs().sum() > 0
    assert not any("value_head" in name for name, _ in engine.weights())

    other = make_engine(**settings)
    other.load_extra_state(extra)
    other.load_optimizer_state(engine.optimizer_state())
    torch.testing.assert_close(other.extra_state(), extra)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_the_same_from_what_was_saved(make_engine, tmp_path, stage):
    from safetensors.torch import save_file

    settings = {"advantage": "gae", "zero_stage": stage, "value_learning_rate": 1e-2}
    engine = stepped(make_engine, 2, **settings)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.policy.lm.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    extra, state = {n: t.clone() for n, t in engine.extra_state().items()}, engine.optimizer_state()
    torch.save(state, tmp_path / "state.pt")
    engine.train(training_samples(settings=engine.config), 1e-3)

    resumed = make_engine(model=tmp_path, **settings)
    resumed.load_extra_state(extra)
    resumed.load_optimizer_state(torch.load(tmp_path / "state.pt", weights_only=False))
    resumed.train(training_samples(settings=engine.config), 1e-3)
    torch.testing.assert_close(copied(resumed), copied(engine), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (3, "float32"), (0, "bfloat16"), (1, "bfloat16")]
)
def test_the_settings_of_now_rule_over_those_of_the_checkpoint(make_engine, stage, dtype):
    settings = {"advantage": "gae", "zero_stage": stage, "dtype": dtype}
    state = stepped(make_engine, **settings, weight_decay=0.1, max_grad_norm=3.0).optimizer_state()
    changed = {"weight_decay": 0.5, "adam_betas": [0.1, 0.2], "max_grad_norm": 0.5, "value_learning_rate": 0.25}
    resumed = make_engine(**settings, **changed, learning_rate=1e-3)
    resumed.load_optimizer_state(state)
    for inner in (resumed._deepspeed.optimizer, resumed._deepspeed.basic_optimizer):
        assert [group["lr"] for group in inner.param_groups] == [1e-3, 0.25]
        assert {(tuple(g["betas"]), g["weight_decay"]) for g in inner.param_groups} == {((0.1, 0.2), 0.5)}
    assert getattr(resumed._deepspeed.optimizer, "clip_grad", 0.5) == 0.5
    resumed.train(training_samples(settings=resumed.config), 1e-4)
    assert [group["lr"] for group in resumed._deepspeed.optimizer.param_groups] == pytest.approx([1e-4, 0.025])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_state_of_another_optimizer_is_refused(make_engine, stage):
    state = stepped(make_engine, zero_stage=stage).optimizer_state()
    other = make_engine(zero_stage=stage, deepspeed={"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}})
    with pytest.raises(
        RunError, match=r"state of the optimizer AdamW, and this run has SGD.*trainer\.deepspeed\.optimizer"
    ):
        other.load_optimizer_state(state)


def test_a_value_head_is_not_put_into_a_run_without_one(make_engine):
    with pytest.raises(RunError, match=r"value_head.*no value head.*trainer\.advantage"):
        make_engine().load_extra_state({"value_head.weight": torch.zeros(1, 32)})


def test_the_value_head_learns_at_a_rate_of_its_own(make_engine):
    engine = make_engine(advantage="gae", learning_rate=1e-3, value_learning_rate=0.5)
    engine.train(training_samples(settings=engine.config), 1e-4)
    assert [group["lr"] for group in engine._deepspeed.optimizer.param_groups] == pytest.approx([1e-4, 0.05])


def test_a_stop_is_heard_before_the_first_update_and_not_between_updates(make_engine):
    config = config_of("gspo", micro_batch_tokens=40)
    stop = StopSignal()
    engine = make_engine(config=config, stop=stop)
    step = engine._deepspeed.step

    def stop_behind_the_first(*arguments):
        step(*arguments)
        stop.request()

    engine._deepspeed.step = stop_behind_the_first
    outcome = engine.train(training_samples(settings=config), LEARNING_RATE)
    assert outcome.metrics["optimizer_steps"] == 2
    before = {name: m.clone() for name, m in momenta(engine).items()}
    with pytest.raises(Stopped):
        engine.train(training_samples(settings=config), LEARNING_RATE)
    torch.testing.assert_close(momenta(engine), before, rtol=0, atol=0)


def test_memory_that_ends_names_the_settings_and_the_longest_row(make_engine):
    engine = make_engine(micro_batch_tokens=40, zero_stage=1)
    engine.policy.lm.lm_head.register_forward_pre_hook(lambda *_: torch.empty(1 << 60))
    with pytest.raises(RunError) as error:
        engine.train(training_samples(), 1e-3)
    text = str(error.value)
    assert re.search(r"in a step whose longest row has \d\d tokens", text)
    for words in ("trainer.micro_batch_tokens=40", "trainer.gradient_checkpointing=false", "trainer.zero_stage=1"):
        assert words in text
    assert "trainer.offload=none" in text


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_every_kind_of_memory_counts(error):
    with (
        pytest.raises(RunError, match="ran out of memory while it loaded"),
        out_of_memory.explained(TrainerConfig(), "while it loaded"),
    ):
        raise error


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory.explained(TrainerConfig(), "somewhere"):
        raise RuntimeError("shapes do not fit")


def test_in_bfloat16_a_step_is_nearly_that_of_float32(make_engine):
    plain = stepped(make_engine, advantage="gae", zero_stage=1)
    short = stepped(make_engine, advantage="gae", zero_stage=1, dtype="bfloat16")
    for (name, one), (_, other) in zip(plain.weights(), short.weights(), strict=True):
        torch.testing.assert_close(other.float(), one, rtol=0.02, atol=0.02, msg=name)
