"""The model's own limits against the settings; where own images must lie; what is recorded of a launch."""

from __future__ import annotations

import json
import stat
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.cli import preflight, preflight_model
from prorl_hpc.cli.composition import Composed
from prorl_hpc.cli.launch import launch, with_absolute_paths
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, PolicyConfig, ProrlConfig
from prorl_hpc.tasks.testing import write_chat_model


@pytest.mark.parametrize(
    ("own", "tokens", "parallel", "told"),
    [
        ({"max_position_embeddings": 512}, 1024, 1, "model.max_context_tokens=1024"),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 4.0}}, 1024, 1, ""),
        ({"text_config": {"max_position_embeddings": 512}}, 513, 1, "at most 512 tokens"),
        ({"n_positions": 512}, 512, 1, ""),
        ({}, 1024, 3, ""),
        ({"num_attention_heads": 8}, 1024, 3, "engine.tensor_parallel=3 does not divide the 8 attention heads"),
        ({"num_attention_heads": 8}, 1024, 4, ""),
    ],
)
def test_what_the_model_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], tokens: int, parallel: int, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(own))
    monkeypatch.setattr(preflight_model, "check_model", lambda *_, **__: [])
    config = ProrlConfig()
    config.model.path, config.model.max_context_tokens = str(tmp_path), tokens
    config.engine.tensor_parallel = parallel
    errors = list(preflight_model.model_problems(config))
    assert len(errors) == bool(told) and all(told in error for error in errors), errors


def test_a_model_that_is_wrong_is_told_by_its_own_setting() -> None:
    config = ProrlConfig()
    config.model.prepare = "tiny"
    config.policies = {
        "a": PolicyConfig(model=ModelConfig(path="/nope")),
        "b": PolicyConfig(model=ModelConfig(prepare="tinny")),
        "c": PolicyConfig(model=ModelConfig(path="/m"), reward="json"),
    }
    errors = [error for error in preflight.preflight(config) if "policies." in error]
    assert [error.split(" is no")[0] for error in errors] == [
        "policies.a.model.path=/nope",
        "policies.b.model.prepare=tinny",
        "policies.c.model.path=/m",
    ], "what the validation tells of rewards is not told again"


def test_a_prepared_model_is_asked_whether_it_can_think(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_model, "is_prepared", lambda _: True)
    monkeypatch.setattr(preflight_model, "prepared_model", lambda _: write_chat_model(tmp_path / "model"))
    config = ProrlConfig()
    config.model.prepare = "tiny"
    monkeypatch.setattr(preflight_model, "check_model_dir", lambda _, **__: None)
    assert list(preflight_model.model_problems(config)) == []
    config.model.thinking = "on"
    config.policies["b"] = PolicyConfig(model=ModelConfig(prepare="tiny", thinking="on"))
    told = [error.split(",")[0] for error in preflight_model.model_problems(config)]
    assert told == ["model.thinking=on", "policies.b.model.thinking=on"]


def test_a_replay_must_be_there_and_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ProrlConfig()
    monkeypatch.chdir(tmp_path)
    config.engine.kind, config.engine.script = "scripted", {"replay": "said.jsonl"}
    told = "engine.script.replay=said.jsonl: there is no such file"
    assert any(told in error for error in preflight.preflight(config))
    (tmp_path / "said.jsonl").write_text("")
    assert not any("replay" in error for error in preflight.preflight(config))
    assert with_absolute_paths(config).engine.script == {"replay": str(tmp_path / "said.jsonl")}


def test_a_dry_run_only_warns_of_too_little_memory() -> None:
    config = ProrlConfig()
    config.run.min_free_memory_gib, config.model.prepare = 1e6, "tiny"
    (told,) = [error for error in preflight.preflight(config) if "GiB of memory available" in error]
    assert "model=tiny" not in told, "it is tiny already"
    assert told in preflight.warnings(config, starting=False)
    assert told not in preflight.preflight(config, starting=False) + preflight.warnings(config)
    config.model.prepare = "smollm2-135m"
    assert any("model=tiny" in warning for warning in preflight.warnings(config, starting=False))


def test_a_run_directory_says_what_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.chdir(tmp_path)
    config = ProrlConfig()
    config.model.path = "/no/model"
    launch(Composed(config, ["trainer.steps=3"]), detach=True, attempt=lambda *_, **__: 0)
    (run,) = (RunDirectory(path.parent) for path in tmp_path.glob("runs/20*/*/config.yaml"))
    record = json.loads((run.path / "environment.json").read_text())
    assert record["overrides"] == ["trainer.steps=3"]
    assert record["packages"]["msgspec"]
    assert record["working_directory_git"]["root"] == str(tmp_path)
    assert run.load_config().run.root == str(tmp_path / "runs")
    for key in run.keys.iterdir():
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def _create(root: str) -> str:
    config = ProrlConfig()
    config.run.root = root
    return str(RunDirectory.create(config).path)


def test_launches_in_the_same_second_never_share_a_directory(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        made = list(pool.map(_create, [str(tmp_path / "runs")] * 20))
    assert len(set(made)) == 20
    assert all(Path(path, "config.yaml").is_file() for path in made)
