"""Makes the fake processes importable here and in the children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FAKES = str(Path(__file__).resolve().parent)
sys.path.insert(0, FAKES)


@pytest.fixture(autouse=True)
def fakes_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [FAKES, os.environ.get("PYTHONPATH")])))
