"""The fake processes of tests/slurm serve here too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FAKES = str(Path(__file__).resolve().parents[1] / "slurm")
sys.path.insert(0, FAKES)


@pytest.fixture(autouse=True)
def fakes_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [FAKES, os.environ.get("PYTHONPATH")])))
