"""What tells two models apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl_hpc.inference.model_identity import ModelIdentity, identify_model


def model(path: Path, tokenizer: str = "{}", **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 64, "architectures": ["A"]} | config))
    (path / "tokenizer.json").write_text(tokenizer)
    return path


def test_a_model_that_was_saved_again_is_the_same(tmp_path: Path) -> None:
    first = identify_model(model(tmp_path / "a", transformers_version="4", dtype="float32"))
    assert first.vocab_size == 64 and len(first.fingerprint) == 16
    assert identify_model(model(tmp_path / "b", transformers_version="5", dtype="bfloat16")) == first


@pytest.mark.parametrize("other", [{"vocab_size": 65}, {"hidden_size": 3}, {"tokenizer": "{ }"}])
def test_another_one_is_another(tmp_path: Path, other: dict[str, object]) -> None:
    first = identify_model(model(tmp_path / "a"))
    assert identify_model(model(tmp_path / "b", **other)).fingerprint != first.fingerprint  # type: ignore[arg-type]


def test_a_vocabulary_in_the_text_part(tmp_path: Path) -> None:
    assert identify_model(model(tmp_path / "a", vocab_size=None, text_config={"vocab_size": 9})).vocab_size == 9


def test_no_model(tmp_path: Path) -> None:
    assert identify_model(tmp_path) == identify_model(tmp_path / "nowhere") == ModelIdentity()
