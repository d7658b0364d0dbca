"""What resume reads of a checkpoint without torch is what the trainer writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.checkpoint_fit import fit_problems
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.trainer import checkpoint
from prorl_hpc.trainer.checkpoint import Position

pytestmark = pytest.mark.train


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_a_saved_checkpoint_fits_its_own_settings_alone(
    make_engine: Any, tiny_model: Path, tmp_path: Path, advantage: str
) -> None:
    checkpoint.save(
        make_engine(zero_stage=1, advantage=advantage), tmp_path, tiny_model, Position(2, 7), run_id="run-1", keep=2
    )
    config = ProrlConfig()
    config.trainer = dataclasses.replace(config.trainer, zero_stage=1, advantage=advantage)
    assert list(fit_problems(config, tmp_path)) == []
    other = "gae" if advantage == "group" else "group"
    config.trainer = dataclasses.replace(
        config.trainer, zero_stage=0, advantage=other, dtype="bfloat16", ranks_per_node=2
    )
    assert len(list(fit_problems(config, tmp_path))) == 4
