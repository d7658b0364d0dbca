"""More held-out prompts than there are rows: all of them are taken, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.cli.preflight_data import data_warnings
from prorl_hpc.config.schema import ProrlConfig


def told(config: ProrlConfig) -> list[str]:
    return [text for text in data_warnings(config) if text.startswith("trainer.eval_prompts")]


@pytest.mark.parametrize(
    ("train", "heldout", "size", "rows"),
    [(0, 0, 63, 63), (0, 0, 64, 0), (0, 30, 64, 30), (0, 64, 64, 0), (200, 0, 64, 20), (640, 0, 64, 0), (5, 0, 64, 1)],
)
def test_it_is_told_where_it_is_known(tmp_path: Path, train: int, heldout: int, size: int, rows: int) -> None:
    config = ProrlConfig()
    config.task.heldout.size = size
    for split, lines in ((config.task.train, train), (config.task.heldout, heldout)):
        if lines:
            file = tmp_path / f"{lines}.jsonl"
            file.write_text("{}\n\n" * lines)
            split.path = str(file)
    found = told(config)
    assert len(found) == bool(rows)
    assert not rows or f"=64: there are {rows} held-out rows" in found[0]
    config.trainer.enabled = False
    assert told(config) == []


def test_nothing_is_told_of_a_file_that_is_not_there() -> None:
    config = ProrlConfig()
    config.task.heldout.path = "/nowhere.jsonl"
    assert told(config) == []
