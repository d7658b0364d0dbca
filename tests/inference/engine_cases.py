"""One engine of each kind with what the contract needs to know about it: a reference to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.scripted_engine import ScriptedEngine, scripted_scores
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate
from prorl_hpc.tasks.testing import write_chat_model

PROMPT = list(range(40, 100))
CONTEXT = 512


class Reference(Protocol):
    """The policy at each version, from outside the engine."""

    def scores(self, token_ids: list[int], version: int) -> list[float]: ...

    def files(self, version: int) -> list[str]:
        """Weights of that version, as a trainer would leave them."""
        ...


@dataclass
class EngineCase:
    """``has_model``: samples from a distribution, has a context limit, reads weight files. ``text``: of its tokenizer."""

    kind: str
    engine: Engine
    reference: Reference
    text: ModelText
    has_model: bool = True

    def update(self, version: int, tolerance: float = 1e-3) -> WeightUpdate:
        probe = WeightProbe(PROMPT, self.reference.scores(PROMPT, version), tolerance)
        return WeightUpdate(version, self.reference.files(version), probe)


class ScriptedReference:
    def scores(self, token_ids: list[int], version: int) -> list[float]:
        return scripted_scores(token_ids, version)

    def files(self, version: int) -> list[str]:
        return []


class ModelReference:
    """transformers, with the tiny model's weights moved a different way for each version; 0 is as on disk."""

    def __init__(self, path: Path, weights_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._path, self._dir = path, weights_dir
        self._models: dict[int, Any] = {0: AutoModelForCausalLM.from_pretrained(path).eval()}

    def _model(self, version: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if version not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._path).eval()
            noise = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.add_(torch.randn(parameter.shape, generator=noise) * parameter.std() * 0.2)
            self._models[version] = model
        return self._models[version]

    def logits(self, token_ids: list[int], version: int) -> Any:
        import torch

        with torch.no_grad():
            return self._model(version)(torch.tensor([token_ids])).logits[0].double()

    def scores(self, token_ids: list[int], version: int) -> list[float]:
        logprobs = self.logits(token_ids, version).log_softmax(-1)
        return [float(logprobs[i, token]) for i, token in enumerate(token_ids[1:])]

    def files(self, version: int) -> list[str]:
        from safetensors.torch import save_file

        path = self._dir / f"v{version}.safetensors"
        if not path.exists():
            state = self._model(version).state_dict()
            save_file({k: v.contiguous() for k, v in state.items() if k != "lm_head.weight"}, path)
        return [str(path)]


@asynccontextmanager
async def open_case(kind: str, tiny_model: Path, weights_dir: Path) -> AsyncIterator[EngineCase]:
    if kind == "scripted":
        model = write_chat_model(weights_dir / "model")
        engine = ScriptedEngine(model_path=model, token_s=0.001)
        await engine.start(lambda text: None)
        yield EngineCase(kind, engine, ScriptedReference(), ModelText(model), has_model=False)
        await engine.stop()
        return
    if kind == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'prorl_hpc[vllm]'")
    reference = ModelReference(tiny_model, weights_dir)
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as runtime:
        made = _vllm(tiny_model, Path(runtime)) if kind == "vllm" else _transformers(tiny_model)
        await made.start(lambda text: None)
        try:
            yield EngineCase(kind, made, reference, ModelText(tiny_model))
        finally:
            await made.stop()


def _transformers(tiny_model: Path) -> Engine:
    from prorl_hpc.inference.transformers_engine import TransformersEngine

    return TransformersEngine(tiny_model, EngineConfig(max_parallel_requests=16), CONTEXT)


def _vllm(tiny_model: Path, runtime: Path) -> Engine:
    from prorl_hpc.inference.accelerators import gpus_of_server
    from prorl_hpc.inference.vllm_engine import VllmEngine
    from prorl_hpc.inference.vllm_process import VllmProcess
    from prorl_hpc.inference.vllm_settings import VllmSettings

    settings = VllmSettings(
        EngineConfig(dtype="float32", start_timeout_s=900),
        tiny_model,
        CONTEXT,
        runtime / "v.sock",
        runtime / "cache",
        gpus_of_server(0, 1),
    )
    return VllmEngine(lambda: VllmProcess(settings, runtime / "vllm.log"), "test-vllm", CONTEXT, restarts=1)
