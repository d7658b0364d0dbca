"""Which engine a configuration means, and what is said when it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.inference import factory
from prorl_hpc.inference.accelerators import gpus_of_server, visible_gpus
from prorl_hpc.messages.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in names else None)
    return names


def test_auto_is_the_best_that_is_installed(installed: set[str]) -> None:
    installed |= {"torch", "transformers", "safetensors"}
    assert factory.resolve_engine("auto") == "transformers"
    installed.add("vllm")
    assert factory.resolve_engine("auto") == "vllm"
    assert factory.available_engines() == ["vllm", "transformers", "scripted"]


def test_a_missing_engine_is_named_with_its_extra(installed: set[str]) -> None:
    assert factory.available_engines() == ["scripted"]
    with pytest.raises(ConfigError, match=r"pip install 'prorl_hpc\[vllm\]'"):
        factory.resolve_engine("vllm")
    with pytest.raises(ConfigError, match=r"pip install 'prorl_hpc\[train\]'"):
        factory.resolve_engine("transformers")
    with pytest.raises(ConfigError, match="no engine is installed"):
        factory.resolve_engine("auto")
    with pytest.raises(ConfigError, match="known are auto, vllm, transformers, scripted"):
        factory.resolve_engine("sglang")


def test_looking_imports_no_engine() -> None:
    look = (
        "import sys; from prorl_hpc.inference.factory import available_engines; available_engines(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", look], cwd=Path(__file__).parents[2]).returncode == 0


def test_gpus_are_shared_out_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert gpus_of_server(1, 2) == ["6", "7"]
    with pytest.raises(ConfigError, match="only 4 are visible"):
        gpus_of_server(2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == [] == gpus_of_server(1, 2)
