"""The reference model and the DeepSpeed JSON that settings name are looked at before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl_hpc.cli.launch import with_absolute_paths
from prorl_hpc.cli.preflight import preflight
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.trainer_files import checkpoint_problems, trainer_problems

WORDS = {"a": 0, "b": 1, "c": 2}


def model(directory: Path, words: dict[str, int], vocab_size: int = 4) -> Path:
    """A directory that looks like a model's from outside; <end> is its added token."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    added = [{"id": len(WORDS), "content": "<end>"}]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    return directory


def config_of(tmp_path: Path, **trainer: object) -> ProrlConfig:
    config = ProrlConfig()
    config.model.path = str(model(tmp_path / "trained", WORDS))
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def test_a_reference_model_with_the_same_words(tmp_path: Path) -> None:
    other = model(tmp_path / "other", WORDS)
    assert list(trainer_problems(config_of(tmp_path, kl_coefficient=0.1, kl_model=str(other)))) == []


@pytest.mark.parametrize(
    ("words", "size", "told"),
    [
        ({"a": 0, "b": 2, "c": 1}, 4, "4 and 4 tokens, 'b' is one that differs"),
        ({"a": 0, "b": 1}, 4, "3 and 4 tokens, 'c' is one that differs"),
        ({**WORDS, "d": 4}, 5, "5 and 4 tokens, 'd' is one that differs"),
        (WORDS, 64, "has vocab_size 64 in its config.json"),
    ],
)
def test_one_with_others_is_refused(tmp_path: Path, words: dict[str, int], size: int, told: str) -> None:
    other = model(tmp_path / "other", words, size)
    (error,) = trainer_problems(config_of(tmp_path, kl_coefficient=0.1, kl_model=str(other)))
    assert error.startswith(f"trainer.kl_model={other} ") and told in error


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("", "is not a directory"),
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "cannot be compared"),
    ],
)
def test_one_that_is_none(tmp_path: Path, missing: str, told: str) -> None:
    other = tmp_path / "other"
    if missing:
        (model(other, WORDS) / missing).unlink()
    (error,) = trainer_problems(config_of(tmp_path, kl_coefficient=0.1, kl_model=str(other)))
    assert error.startswith("trainer.kl_model") and told in error


def test_the_name_of_a_model_on_a_hub_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, kl_coefficient=0.1, kl_model="Qwen/Qwen3-0.6B")
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    told = [error for error in preflight(config) if "hf download" in error]
    for setting, name in (("model.path", "Qwen/Qwen2.5-7B-Instruct"), ("trainer.kl_model", "Qwen/Qwen3-0.6B")):
        (error,) = [error for error in told if error.startswith(f"{setting}=")]
        assert f"hf download {name} --local-dir DIR" in error and f"then {setting}=DIR" in error
    config.model.path, config.trainer.kl_model = "/models/qwen", "./models"
    assert not any("hf download" in error for error in preflight(config))


def test_a_run_goes_on_with_the_vocabulary_that_it_has(tmp_path: Path) -> None:
    config, checkpoints = config_of(tmp_path), tmp_path / "checkpoints"
    assert list(checkpoint_problems(config, checkpoints)) == []
    checkpoints.mkdir()
    model(checkpoints / "step-2", {"other": 0})
    model(checkpoints / "step-10", WORDS)
    model(checkpoints / "step-11.damaged", {"other": 0})
    (model(checkpoints / "step-12", {"other": 0}) / "tokenizer.json").write_text("{")
    assert list(checkpoint_problems(config, checkpoints)) == []
    model(tmp_path / "trained", {"a": 1, "b": 0, "c": 2})
    (error,) = checkpoint_problems(config, checkpoints)
    assert error.startswith(
        f"model.path={tmp_path / 'trained'}, which the LLM servers load, has another vocabulary than"
    )
    assert "step-10" in error and "'a' is one that differs" in error


def test_a_deepspeed_json_is_read_before_the_start(tmp_path: Path) -> None:
    assert "trainer.deepspeed_file" in next(trainer_problems(config_of(tmp_path, deepspeed_file="/nope.json")))
    file = tmp_path / "own.json"
    for text, told in (("{", "cannot be read as JSON"), ("[]", "must hold a JSON object"), ('{"fp16": {}}', "'fp16'")):
        file.write_text(text)
        (error,) = trainer_problems(config_of(tmp_path, deepspeed_file=str(file)))
        assert told in error
    file.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 1}}')
    assert list(trainer_problems(config_of(tmp_path, deepspeed_file=str(file)))) == []


def test_nothing_is_looked_at_where_no_trainer_runs(tmp_path: Path) -> None:
    assert list(trainer_problems(config_of(tmp_path, enabled=False, deepspeed_file="/nope.json"))) == []


def test_other_nodes_find_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = with_absolute_paths(config_of(tmp_path, kl_model="ref", deepspeed_file="own.json")).trainer
    assert (trainer.kl_model, trainer.deepspeed_file) == (f"{tmp_path}/ref", f"{tmp_path}/own.json")
    assert with_absolute_paths(config_of(tmp_path)).trainer.kl_model == ""


def test_wandb_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    told = [error for error in preflight(config_of(tmp_path, wandb="offline")) if "trainer.wandb" in error]
    assert len(told) == 1 and "trainer.wandb=offline needs the package wandb" in told[0]
    assert not any("trainer.wandb" in error for error in preflight(config_of(tmp_path)))
