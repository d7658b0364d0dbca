"""resume compares the settings with what the newest checkpoint was saved by, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from prorl_hpc.config.checkpoint_fit import fit_problems
from prorl_hpc.config.schema import ProrlConfig


def checkpoint(checkpoints: Path, step: int, *, value_head: bool = False, **state: Any) -> Path:
    directory = checkpoints / f"step-{step}" / "trainer_state"
    directory.mkdir(parents=True)
    saved = {"world": 2, "zero_stage": 1, "dtype": "torch.float32", **state}
    (directory / "state.json").write_text(json.dumps(saved))
    with ZipFile(directory / "extra.pt", "w") as archive:
        archive.writestr("extra/data.pkl", b"")
        if value_head:
            archive.writestr("extra/data/0", b"")
    return directory


def config_of(**settings: Any) -> ProrlConfig:
    config = ProrlConfig()
    config.trainer.ranks_per_node = 2
    config.cluster.kind = "slurm"
    for name, value in settings.items():
        setattr(config.trainer, name, value)
    return config


def test_nothing_is_said_before_there_is_a_checkpoint_and_where_it_fits(tmp_path: Path) -> None:
    assert list(fit_problems(config_of(zero_stage=3), tmp_path)) == []
    checkpoint(tmp_path, 1)
    assert list(fit_problems(config_of(), tmp_path)) == []
    assert list(fit_problems(config_of(dtype="auto"), tmp_path)) == []
    assert list(fit_problems(config_of(enabled=False, zero_stage=3), tmp_path)) == []


@pytest.mark.parametrize(
    ("settings", "told", "back"),
    [
        ({"zero_stage": 2}, "trainer.zero_stage=2 does not fit the optimizer state of ZeRO stage 1", "zero_stage=1"),
        ({"dtype": "bfloat16"}, "trainer.dtype=bfloat16 does not fit the optimizer state in float32", "dtype=float32"),
        ({"advantage": "gae"}, "trainer.advantage=gae needs a value head", "trainer.advantage=group"),
        ({"ranks_per_node": 1}, "=1 on cluster.trainer.nodes=1: 1 trainer rank(s)", "cluster.trainer.nodes=2"),
        ({"ranks_per_node": 3}, "3 trainer rank(s) do not fit the optimizer state of 2", "trainer.ranks_per_node=2"),
        ({"ranks_per_node": 0}, None, None),
    ],
)
def test_what_does_not_fit_is_told_with_the_way_back(
    tmp_path: Path, settings: dict[str, Any], told: str | None, back: str | None
) -> None:
    path = checkpoint(tmp_path, 7).parent
    found = list(fit_problems(config_of(**settings), tmp_path))
    if told is None or back is None:
        assert found == []
        return
    (error,) = found
    assert told in error and back in error.partition("go on with ")[2]
    assert f"model=path model.path={path}" in error


def test_a_value_head_that_there_is_must_go_on(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, value_head=True)
    (error,) = fit_problems(config_of(), tmp_path)
    assert "trainer.advantage=group has no value head, and there is one" in error
    assert "go on with trainer.advantage=gae" in error
    assert list(fit_problems(config_of(advantage="gae"), tmp_path)) == []


def test_nodes_are_ranks_and_the_same_number_fits_otherwise_cut(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, world=4)
    config = config_of()
    (error,) = fit_problems(config, tmp_path)
    assert "go on with trainer.ranks_per_node=4 or cluster.trainer.nodes=2." in error
    config.cluster.trainer.nodes = 2
    assert list(fit_problems(config, tmp_path)) == []
    config.cluster.trainer.same_nodes_as, config.cluster.inference.nodes = "inference", 1
    (error,) = fit_problems(config, tmp_path)
    assert "on cluster.inference.nodes=1" in error and "or cluster.inference.nodes=2" in error
    config.cluster.kind = "local"
    (error,) = fit_problems(config, tmp_path)
    assert "go on with trainer.ranks_per_node=4." in error


def test_gpus_of_slurm_make_another_dtype_of_auto(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    config = config_of(dtype="auto")
    config.cluster.trainer.gpus = 2
    (error,) = fit_problems(config, tmp_path)
    assert "trainer.dtype=auto, which is bfloat16 on GPUs" in error and "go on with trainer.dtype=float32" in error


def test_the_newest_that_reads_counts(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9, zero_stage=2)
    checkpoint(tmp_path, 10)
    (checkpoint(tmp_path, 11) / "state.json").write_text("{")
    (checkpoint(tmp_path, 12) / "extra.pt").write_bytes(b"no zip")
    assert list(fit_problems(config_of(), tmp_path)) == []
    assert len(list(fit_problems(config_of(zero_stage=2), tmp_path))) == 1
