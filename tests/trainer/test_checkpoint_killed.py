"""Processes that are killed while they save: there is always a whole checkpoint, and it is the last one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train


@pytest.fixture
def model_files(tmp_path: Path) -> Path:
    """Of a model, what ``save`` copies."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    (directory / "tokenizer.json").write_text("{}" * 1000)
    return directory


def killed(mode: str, tmp_path: Path, model: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("checkpoint_saver.py")
    command = [sys.executable, str(script), mode, str(tmp_path / "checkpoints"), str(model), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_process_killed_at_any_moment_leaves_its_last_checkpoint(tmp_path, model_files):
    for after in killed("moments", tmp_path, model_files):
        # One more may have come to be than was told.
        assert after["step"] in (after["sure"], after["sure"] + 1), after
        assert after["step"] == 0 or (after["whole"] and not after["damaged"] and not after["best_damage"]), after
    assert after["step"] > 5, "too slow a machine: almost every process was killed before its first save"


def test_a_process_killed_before_any_operation_of_a_save_leaves_its_last_checkpoint(tmp_path, model_files):
    outcomes = killed("operations", tmp_path, model_files)
    assert len(outcomes) > 40 and outcomes[-1]["over"]
    assert [after["step"] for after in outcomes] == sorted(after["step"] for after in outcomes)
    assert {after["step"] for after in outcomes} == {2, 3}
    for after in outcomes:
        assert after["whole"] and not after["damaged"] and not after["best_damage"], after
        assert after["best"] in (2, 3)
        # Saved again by whoever goes on: nothing of the killed one is left.
        assert after["again"]["step"] == 3 and after["again"]["whole"] and after["again"]["best"] == 3, after
        # The next best model clears away the one before.
        assert {*after["names"]} - {".best-2-2.0-"} == {".best-3-3.0-", "best", "step-2", "step-3"}, after
