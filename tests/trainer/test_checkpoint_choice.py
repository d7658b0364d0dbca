"""Which checkpoint a run goes on from, and what is told of those that it cannot use; the best model; full disks."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoint_saver import engine

from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer import best_model, checkpoint
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.checkpoint_files import CheckpointNotWritten
from prorl_hpc.trainer.heldout_set import HeldOutSet
from prorl_hpc.trainer.manifest import Manifest, damage

pytestmark = pytest.mark.train


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def three(tmp_path: Path, model: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", model, step)
    return tmp_path / "checkpoints"


def save(checkpoints: Path, model: Path, step: int, size: int = 1000) -> Path:
    checkpoints.mkdir(exist_ok=True)
    return checkpoint.save(engine(step, size), checkpoints, model, Position(step, 3 * step), run_id="run-1", keep=3)


def flip(path: Path) -> None:
    """Another value in the middle, the size as before."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_the_manifest_has_every_file(three):
    path = three / "step-3"
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert manifest.files.keys() == files - {"manifest.json"}
    assert {"model.safetensors", "config.json", "trainer_state/rank-00000.pt", "trainer_state/state.json"} <= files
    assert damage(path) == []


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        ("model.safetensors", flip, r"model.safetensors: expected \d+ bytes, sha256 \w{16}….*found \d+ bytes, sha256 \w{16}…"),
        ("trainer_state/rank-00000.pt", cut, r"rank-00000.pt: expected (\d+) bytes, sha256 .*; found \d+ bytes"),
        ("config.json", Path.unlink, r"config.json: expected .*; found No such file"),
        ("manifest.json", cut, r"manifest.json cannot be read"),
        ("manifest.json", Path.unlink, r"manifest.json is not there"),
    ],
)  # fmt: skip
def test_a_damaged_one_is_told_and_the_one_before_is_used(three, model, caplog, file, harm, told):
    harm(three / "step-3" / file)
    chosen = checkpoint.choose(three, "run-1")
    assert chosen is not None and chosen.state.position == Position(2, 6)
    assert re.search(told, caplog.text), caplog.text
    # Set aside: the run saves a step 3 of its own.
    assert (three / "step-3.damaged").is_dir() and not (three / "step-3").exists()
    save(three, model, 3)
    again = checkpoint.choose(three, "run-1")
    assert again is not None and again.path.name == "step-3"


def test_a_run_does_not_silently_begin_again_when_all_are_damaged(three):
    for step in (1, 2, 3):
        cut(three / f"step-{step}" / "model.safetensors")
    with pytest.raises(RunError, match=r"no checkpoint in .* is as it was written: .*step-3.*step-1.*to begin again"):
        checkpoint.choose(three, "run-1")
    assert [p.name for p in checkpoint.all_checkpoints(three)] == ["step-1", "step-2", "step-3"]


def test_another_runs_checkpoint_is_refused(three):
    with pytest.raises(RunError, match=r"step-3 was saved by the run run-1, and this is run-2.*model\.path=.*step-3"):
        checkpoint.choose(three, "run-2")


def test_each_that_is_kept_can_be_resumed_from(three):
    for step in (3, 2, 1):
        chosen = checkpoint.choose(three, "run-1")
        assert chosen is not None and chosen.state.position.step == step
        state = torch.load(chosen.path / "trainer_state" / "rank-00000.pt", weights_only=False)
        assert torch.equal(state["optimizer"]["exp_avg"], torch.full((4000,), float(step)))
        shutil.rmtree(chosen.path)
    assert checkpoint.choose(three, "run-1") is None


# --- the best model ---


def test_the_best_model_shares_the_files_of_its_step_and_outlives_it(three, model):
    best_model.keep(engine(2, 1000), three, model, BestModel(2, 0.5))
    ours, theirs = three / "best" / "model.safetensors", three / "step-2" / "model.safetensors"
    assert ours.samefile(theirs)
    assert not (three / "best" / "trainer_state").exists() and damage(three / "best") == []
    shutil.rmtree(three / "step-2")
    assert damage(three / "best") == []


def test_only_a_better_model_takes_its_place(three, model):
    kept = []
    for step, reward in ((0, 0.9), (2, 0.5), (4, 0.4), (5, 0.5), (6, 0.75)):
        if best_model.is_better(three, BestModel(step, reward)):
            best_model.keep(engine(step, 1000), three, model, BestModel(step, reward))  # 6 has no checkpoint
            kept.append(step)
    assert kept == [2, 6]
    assert best_model.best(three) == BestModel(6, 0.75)
    assert damage(three / "best") == []
    assert [p.name for p in three.glob(".best*")] == [".best-6-0.75-"]


def test_what_was_measured_on_other_rollouts_is_no_comparison(three, model, caplog):
    before, now = HeldOutSet(64, 1, 1.0, "a"), HeldOutSet(8, 1, 1.0, "b")
    best_model.keep(engine(2, 1000), three, model, BestModel(2, 0.9, before))
    assert not best_model.is_better(three, BestModel(4, 0.9, before)) and not caplog.records
    assert not best_model.is_better(three, BestModel(0, 0.5, now))
    with caplog.at_level("INFO"):
        assert best_model.is_better(three, BestModel(4, 0.5, now))
    assert "prompts=64" in caplog.text and "prompts=8" in caplog.text and "anew" in caplog.text
    best_model.keep(engine(4, 1000), three, model, BestModel(4, 0.5, now))
    assert best_model.best(three) == BestModel(4, 0.5, now)
    assert not best_model.is_better(three, BestModel(5, 0.4, now))


def test_without_hard_links_it_is_a_copy(three, model, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    best_model.keep(engine(2, 1000), three, model, BestModel(2, 0.5))
    assert not (three / "best" / "model.safetensors").samefile(three / "step-2" / "model.safetensors")
    assert damage(three / "best") == []


# --- a full disk ---


def test_too_little_space_is_told_before_anything_is_written(three, model, monkeypatch):
    usage = shutil.disk_usage(three)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024**2))
    before = {p.name for p in three.iterdir()}
    with pytest.raises(
        CheckpointNotWritten, match=r"step-4 was not written: rank 0: no space.*needs 0\.03 GiB.*0\.00 GiB free"
    ):
        save(three, model, 4)
    assert {p.name for p in three.iterdir()} == before


@pytest.mark.parametrize("limit", [10_000, 20_000_000], ids=["optimizer", "weights"])
def test_a_disk_that_refuses_midway_leaves_the_last_checkpoint_and_no_part_of_a_new_one(three, model, limit):
    """The kernel refuses to let any file grow beyond a limit: that of a quota looks the same to who writes."""
    big = engine(4, 3_000_000)
    if limit > 10_000:
        big.optimizer_state = lambda: {"exp_avg": torch.zeros(10)}
    before = {p.name for p in three.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointNotWritten, match=r"step-4 was not written: rank 0: .*needs 0\.\d+ GiB"):
            checkpoint.save(big, three, model, Position(4, 12), run_id="run-1", keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name for p in three.iterdir()} == before
    chosen = checkpoint.choose(three, "run-1")
    assert chosen is not None and chosen.state.position.step == 3
    save(three, model, 4)  # when there is room again
