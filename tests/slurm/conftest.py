"""Makes the fake processes importable here and in the children."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAKES = str(Path(__file__).resolve().parent)
sys.path.insert(0, FAKES)


@pytest.fixture(autouse=True)
def fakes_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [FAKES, os.environ.get("PYTHONPATH")])))


@pytest.fixture
def site(slurm_namespaced: Any) -> Iterator[Any]:
    """The namespaced cluster as a place where things go wrong: whole again after each test."""
    from faulty_site import FaultySite

    site = FaultySite(slurm_namespaced)
    site.clean()
    yield site
    site.clean()
