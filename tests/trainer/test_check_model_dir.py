from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prorl_hpc.config.model_directory import check_model_dir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return tmp_path


def test_a_whole_model_passes(model, tiny_model):
    check_model_dir(model)
    check_model_dir(str(tiny_model))


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no weights \(\*\.safetensors\): the download"),
        ("tokenizer.json", r"no tokenizer.json: save .*save_pretrained"),
        ("tokenizer_config.json", "no chat template"),
    ],
)
def test_what_is_missing_is_named(model, missing, complaint):
    (model / missing).unlink()
    with pytest.raises(ValueError, match=complaint):
        check_model_dir(model)


def test_a_template_file_suffices(model):
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    check_model_dir(model)


def test_weights_in_another_format_are_named(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which must be converted"):
        check_model_dir(model)


def test_a_lacking_shard_is_named(model):
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(ValueError, match=r"lacks 1 of 1 weight files .*model-2"):
        check_model_dir(model)


def test_broken_json_and_missing_directories(model):
    (model / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        check_model_dir(model)
    shutil.rmtree(model)
    for path in (model, ""):
        with pytest.raises(ValueError, match=r"model\.path=.* is not a directory"):
            check_model_dir(path)


@pytest.mark.parametrize("text", ["{bad", "[]", "{}"])
def test_a_configuration_that_is_none_is_refused(model, text):
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        check_model_dir(model)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_weights_that_were_cut_short_are_refused(model, keep):
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors .*copy it again"):
        check_model_dir(model)
