"""A private directory for sockets with a short path, and the tiny model, made once per session."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_bench import Bench

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


@pytest.fixture
async def bench(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """Makes vLLM engines around fake servers."""
    from vllm_bench import Bench

    monkeypatch.setattr("prorl_hpc.inference.vllm_engine.check_weight_plugin", lambda: None)
    monkeypatch.setattr("prorl_hpc.inference.vllm_settings.vllm_version", lambda: "0+cpu")
    made = Bench(socket_dir)
    yield made
    for process in made.processes:
        await process.stop()
