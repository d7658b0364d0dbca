"""Runtimes to test, and a look at what they leave behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from sandbox_runtimes import KINDS, prepared

from prorl_hpc.sandbox.attached_runtime import AttachedRuntime


@pytest.fixture
def others() -> set[int]:
    """Children that this process had before the test: clusters of the whole session, say, whose own children come and go."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def runtime_dir(others: set[int]) -> Iterator[Path]:
    """Named as a run's is, but in a place of its own: what starts elsewhere on this node sweeps what it finds beside it.
    Whatever a test left in it fails the test."""
    place = Path(tempfile.mkdtemp(prefix="prorl-test-", dir="/tmp"))
    path = place / f"prorl-{os.getuid()}-t"
    path.mkdir(mode=0o700)
    yield path
    left = [str(p) for p in path.rglob("*")]
    shutil.rmtree(place)
    assert left == []


@pytest.fixture(params=KINDS)
async def runtime(request: pytest.FixtureRequest, runtime_dir: Path) -> AsyncIterator[AttachedRuntime]:
    runtime = await prepared(request.param, runtime_dir)
    yield runtime
    await runtime.close()
