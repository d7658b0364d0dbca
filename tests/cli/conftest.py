"""The fake processes of tests/slurm serve here too; runs are entered in an index of each test's own."""

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


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path_factory.mktemp("prorl-home")))
