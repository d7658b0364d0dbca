"""A private directory for sockets with a short path, and the tiny model, made once per session."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "slurm"))  # fakes.container


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'prorl_hpc[train]'")
    from tiny_model import make_tiny_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(path)
    return path
