from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_samples import training_samples
from trainer_tiny_model import make_tiny_qwen3

from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer import checkpoint
from prorl_hpc.trainer.checkpoint import Position

pytestmark = pytest.mark.train


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.weights()}


def train(engine, steps):
    for step in steps:
        engine.train(training_samples(seed=step), 1e-3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_steps_and_two_after_resume_equal_four(make_engine, tiny_model, tmp_path, stage):
    whole = make_engine(zero_stage=stage)
    train(whole, range(4))
    first = make_engine(zero_stage=stage)
    train(first, range(2))
    checkpoint.save(first, tmp_path, tiny_model, Position(2, 7), run_id="run-1", keep=2)

    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.state.position == Position(2, 7)
    second = make_engine(model=newest.path, zero_stage=stage)
    checkpoint.restore(second, newest)
    train(second, range(2, 4))
    expected = weights_of(whole)
    for name, tensor in weights_of(second).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_was_saved(make_engine, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_tiny_qwen3(tmp_path / "model", tied=tied)
    engine = make_engine(model=model, zero_stage=1)
    train(engine, [0])
    path = checkpoint.save(engine, tmp_path, model, Position(1, 4), run_id="run-1", keep=2)
    lm = AutoModelForCausalLM.from_pretrained(path)
    assert lm.dtype == torch.float32
    live = weights_of(engine)
    for name, parameter in lm.named_parameters():
        assert torch.equal(parameter, live[name]), name
    assert ("lm_head.weight" in live) is not tied
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert (path / "generation_config.json").exists()


def test_large_models_are_saved_in_shards(make_engine, tiny_model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("prorl_hpc.trainer.weights.MAX_SHARD_BYTES", 40_000)
    engine = make_engine(zero_stage=3)
    path = checkpoint.save(engine, tmp_path, tiny_model, Position(1, 4), run_id="run-1", keep=2)
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    lm = AutoModelForCausalLM.from_pretrained(path)
    live = weights_of(engine)
    assert all(torch.equal(p, live[name]) for name, p in lm.named_parameters())


def test_only_whole_checkpoints_are_resumed_from_and_old_ones_go(make_engine, tiny_model, tmp_path):
    engine = make_engine(zero_stage=0)
    train(engine, [0])
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 3):
        checkpoint.save(engine, tmp_path, tiny_model, Position(step, step), run_id="run-1", keep=2)
    assert [p.name for p in checkpoint.all_checkpoints(tmp_path)] == ["step-2", "step-3"]
    assert all((p / "trainer_state" / "state.json").exists() for p in checkpoint.all_checkpoints(tmp_path))
    (tmp_path / ".step-4.partial" / "trainer_state").mkdir(parents=True)  # a writer was killed here
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.path.name == "step-3"
    checkpoint.save(engine, tmp_path, tiny_model, Position(10, 9), run_id="run-1", keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10"]


@pytest.mark.parametrize(
    "breaks", ["torch.save", "write_safetensors", "_copy_model_files", "write_json", "write_manifest", "sync"]
)
def test_a_writer_that_is_killed_leaves_the_last_whole_one(make_engine, tiny_model, tmp_path, monkeypatch, breaks):
    engine = make_engine(zero_stage=0)
    checkpoint.save(engine, tmp_path, tiny_model, Position(1, 1), run_id="run-1", keep=1)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(f"prorl_hpc.trainer.checkpoint_files.{breaks}", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(engine, tmp_path, tiny_model, Position(2, 2), run_id="run-1", keep=1)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.state.position == Position(1, 1)
    checkpoint.restore(engine, newest)
    checkpoint.save(engine, tmp_path, tiny_model, Position(2, 2), run_id="run-1", keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2"]


def test_a_step_that_is_saved_is_left_alone(make_engine, tiny_model, tmp_path):
    engine = make_engine(zero_stage=0)
    path = checkpoint.save(engine, tmp_path, tiny_model, Position(1, 1), run_id="run-1", keep=2)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.save(engine, tmp_path, tiny_model, Position(1, 1), run_id="run-1", keep=2) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written


def test_other_settings_are_refused_with_a_way_out(make_engine, tiny_model, tmp_path):
    engine = make_engine(zero_stage=0)
    checkpoint.save(engine, tmp_path, tiny_model, Position(1, 1), run_id="run-1", keep=2)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    other = make_engine(model=newest.path, zero_stage=1)
    with pytest.raises(RunError, match=r"ZeRO stage 0 .*this run has 1, stage 1.*model\.path="):
        checkpoint.restore(other, newest)


def test_paths_of_steps(tmp_path: Path):
    assert checkpoint.step_directory(tmp_path, 12) == tmp_path / "step-12"
