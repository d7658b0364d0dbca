"""Checkpoint directories that people moved, copied or tore: links, files and directories where others are expected."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoint_saver import engine

from prorl_hpc.trainer import best_model, checkpoint
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.checkpoint_files import CheckpointNotWritten
from prorl_hpc.trainer.manifest import damage

pytestmark = pytest.mark.train


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    return directory


@pytest.fixture
def checkpoints(tmp_path: Path, model: Path) -> Path:
    """Of steps 1 and 2."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    for step in (1, 2):
        save(directory, model, step)
    return directory


def save(checkpoints: Path, model: Path, step: int, keep: int = 2) -> Path:
    return checkpoint.save(engine(step, 1000), checkpoints, model, Position(step, step), run_id="run-1", keep=keep)


def keep_best(checkpoints: Path, model: Path, step: int, reward: float) -> None:
    new = BestModel(step, reward)
    if best_model.is_better(checkpoints, new):
        best_model.keep(engine(step, 1000), checkpoints, model, new)


def step_of(checkpoints: Path) -> int:
    chosen = checkpoint.choose(checkpoints, "run-1")
    assert chosen is not None
    return chosen.state.position.step


def test_one_that_was_moved_to_other_storage_stays_there_when_its_turn_to_go_comes(
    checkpoints, model, tmp_path, caplog
):
    elsewhere = tmp_path / "elsewhere"
    (checkpoints / "step-1").rename(elsewhere)
    (checkpoints / "step-1").symlink_to(elsewhere)
    caplog.set_level("INFO")
    for step in (3, 4):
        save(checkpoints, model, step)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-3", "step-4"]
    assert damage(elsewhere) == []
    assert f"step-1 was a link: {elsewhere} is left as it is" in caplog.text


def test_one_that_cannot_be_removed_ends_nothing(checkpoints, model, monkeypatch, caplog):
    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", refused)
        save(checkpoints, model, 3)
    assert "step-1 is no longer needed, and cannot be removed" in caplog.text
    assert sorted(p.name for p in checkpoints.iterdir()) == [".step-1.old", "step-2", "step-3"]
    save(checkpoints, model, 4)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-3", "step-4"]


@pytest.mark.parametrize("name", [".x.partial", ".step-3.partial", ".step-1.old"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling", "directory"])
def test_whatever_has_the_name_of_a_leftover_is_cleared_away(checkpoints, model, tmp_path, name, kind):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("x")
    leftover = checkpoints / name
    if kind == "file":
        leftover.write_text("x")
    elif kind == "directory":
        shutil.copytree(other, leftover)
    else:
        leftover.symlink_to(other if kind == "link" else "nowhere")
    save(checkpoints, model, 3)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-2", "step-3"]
    assert (other / "mine").exists()


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_what_has_the_name_of_a_checkpoint_and_is_none_is_moved_out_of_its_way(checkpoints, model, kind):
    if kind == "file":
        (checkpoints / "step-3").write_text("x")
    else:
        (checkpoints / "step-3").symlink_to("nowhere")
    save(checkpoints, model, 3)
    assert step_of(checkpoints) == 3
    assert os.path.lexists(checkpoints / "step-3.damaged")


def test_a_refusal_for_another_reason_than_space_does_not_ask_for_space_alone(checkpoints, model, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "trainer_state")

    monkeypatch.setattr("prorl_hpc.trainer.checkpoint_files.write_json", refused)
    with pytest.raises(
        CheckpointNotWritten, match=r"Permission denied.*Make room there, or mend what is told of a rank"
    ):
        save(checkpoints, model, 3)


# --- incomplete ones ---


def without(directory: Path, *names: str) -> None:
    """Neither there nor in the manifest."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in names:
        del manifest["files"][name]
        (directory / name).unlink()
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "trainer_state/state.json",
        "trainer_state/extra.pt",
        "trainer_state/rank-00000.pt",
    ],
)
def test_one_whose_manifest_lacks_a_file_is_not_whole(checkpoints, caplog, name):
    without(checkpoints / "step-2", name)
    assert step_of(checkpoints) == 1
    assert f"step-2/{name}" in caplog.text
    latest = checkpoint.latest(checkpoints)
    assert latest is not None and latest.state.position.step == 1


def test_an_empty_manifest_is_damage(checkpoints):
    (checkpoints / "step-2" / "manifest.json").write_text('{"files":{}}')
    assert step_of(checkpoints) == 1


def test_all_shards_of_the_weights_are_demanded(checkpoints, model, monkeypatch):
    monkeypatch.setattr("prorl_hpc.trainer.weights.MAX_SHARD_BYTES", 5000)
    path = save(checkpoints, model, 3)
    assert damage(path) == []
    without(path, "model-00002-of-00004.safetensors")
    assert damage(path) == [f"{path}/model-00002-of-00004.safetensors: not in manifest.json"]
    assert step_of(checkpoints) == 2


# --- the best model ---


@pytest.mark.parametrize("kept", [None, 0.5])
def test_a_best_that_was_copied_as_a_directory_gives_way_to_a_better_one(checkpoints, model, kept):
    keep_best(checkpoints, model, 1, 0.5)
    there = (checkpoints / "best").resolve()
    (checkpoints / "best").unlink()
    shutil.copytree(there, checkpoints / "best")
    if kept is None:
        (checkpoints / "best" / "best.json").unlink()
    keep_best(checkpoints, model, 2, 0.75)
    assert best_model.best(checkpoints) == BestModel(2, 0.75)
    assert (checkpoints / "best").is_symlink() and damage(checkpoints / "best") == []
    assert len(list(checkpoints.glob(".best*"))) == 1


@pytest.mark.parametrize("content", ["", '{"step": "one"}', "a directory", "best is a file"])
def test_a_record_of_the_best_that_cannot_be_read_is_told_and_ends_nothing(checkpoints, model, caplog, content):
    keep_best(checkpoints, model, 1, 0.5)
    record = checkpoints / "best" / "best.json"
    if content == "best is a file":
        (checkpoints / "best").unlink()
        (checkpoints / "best").write_text("x")
    elif content == "a directory":
        record.unlink()
        record.mkdir()
    else:
        record.write_text(content)
    keep_best(checkpoints, model, 2, 0.25)
    assert best_model.best(checkpoints) == BestModel(2, 0.25)
    assert "best.json cannot be read" in caplog.text


def test_older_best_models_are_removed_whatever_they_are(checkpoints, model, tmp_path):
    (checkpoints / ".best-0-0.1").symlink_to(tmp_path)
    (checkpoints / ".best-0-0.2").write_text("x")
    keep_best(checkpoints, model, 1, 0.5)
    assert len(list(checkpoints.glob(".best*"))) == 1 and tmp_path.exists()
