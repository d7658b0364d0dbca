from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("deepspeed") is None:
    collect_ignore_glob = ["test_*.py"]
    print("tests/trainer skipped: torch or deepspeed is missing (pip install 'prorl_hpc[train]')")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer_tiny_model import make_tiny_qwen3

    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This process as the only rank; a process can join one group only."""
    import torch
    import torch.distributed as dist

    from prorl_hpc.trainer.engine import prepare_deepspeed
    from prorl_hpc.trainer.process_group import join

    torch.set_num_threads(1)  # tiny tensors, and cores that others use too
    group = join(tmp_path_factory.mktemp("state"), rank=0, world=1, local_rank=0, host="127.0.0.1", timeout_s=60)
    prepare_deepspeed()
    yield group
    dist.destroy_process_group()


@pytest.fixture
def make_engine(tiny_model: Path, commands: Any) -> Callable[..., Any]:
    """``make_engine(zero_stage=1, …)``: an Engine of the tiny model with these trainer settings."""
    from prorl_hpc.config.schema import TrainerConfig
    from prorl_hpc.trainer.engine import Engine
    from prorl_hpc.trainer.stopping import StopSignal

    def make(
        model: Path = tiny_model,
        stop: StopSignal | None = None,
        config: TrainerConfig | None = None,
        reference_path: str = "",
        **settings: Any,
    ) -> Engine:
        defaults: dict[str, Any] = {"threads": 1, "max_grad_norm": 1e9, "dtype": "float32"}
        config = config or TrainerConfig(**(defaults | settings))
        signal = stop or StopSignal()
        return Engine(str(model), config, signal, world=1, commands=commands, reference_path=reference_path)

    return make
