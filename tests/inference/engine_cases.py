"""One engine of each kind with what the contract needs to know about it: a reference to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.scripted_engine import ScriptedEngine, scripted_scores
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate
from prorl_hpc.tasks.testing import write_chat_model
from prorl_hpc.transport.weight_server import OfferedTensor, WeightServer
from prorl_hpc.transport.weight_stream import read_key

if TYPE_CHECKING:
    from prorl_hpc.inference.vllm_engine import VllmEngine

PROMPT = list(range(40, 100))
CONTEXT = 512


class Reference(Protocol):
    """The policy at each version, from outside the engine."""

    def scores(self, token_ids: list[int], version: int) -> list[float]: ...

    def files(self, version: int) -> list[str]:
        """Weights of that version, as a trainer would leave them."""
        ...

    def tensors(self, version: int) -> list[OfferedTensor]:
        """The same, as a trainer would stream them."""
        ...


@dataclass
class EngineCase:
    """``stream``: the trainer's side. ``has_model``: samples from a distribution, has a context limit, reads weight files.
    ``text``: of its tokenizer."""

    kind: str
    engine: Engine
    reference: Reference
    text: ModelText
    stream: WeightServer
    has_model: bool = True

    def update(self, version: int, tolerance: float = 1e-3, way: str = "disk") -> WeightUpdate:
        probe = WeightProbe(PROMPT, self.reference.scores(PROMPT, version), tolerance)
        if way == "direct":
            return WeightUpdate(version, [], probe, source=self.stream.offer(self.reference.tensors(version)))
        return WeightUpdate(version, self.reference.files(version), probe)


class ScriptedReference:
    def scores(self, token_ids: list[int], version: int) -> list[float]:
        return scripted_scores(token_ids, version)

    def files(self, version: int) -> list[str]:
        return []

    def tensors(self, version: int) -> list[OfferedTensor]:
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

    def tensors(self, version: int) -> list[OfferedTensor]:
        from prorl_hpc.trainer.direct_copy import copies, offered

        return [offered(name, tensor) for name, tensor in copies(self._model(version).named_parameters(), keep=True)]


def new_secret(directory: Path) -> Path:
    path = directory / "stream.secret"
    path.touch(mode=0o600)
    path.write_bytes(b"between the trainer and its servers")
    return path


@asynccontextmanager
async def open_case(kind: str, tiny_model: Path, weights_dir: Path) -> AsyncIterator[EngineCase]:
    secret = new_secret(weights_dir)
    stream = WeightServer("127.0.0.1", read_key(secret))
    async with _open_case(kind, tiny_model, weights_dir, stream, secret) as case:
        yield case
    stream.close()


@asynccontextmanager
async def _open_case(
    kind: str, tiny_model: Path, weights_dir: Path, stream: WeightServer, secret: Path
) -> AsyncIterator[EngineCase]:
    if kind == "scripted":
        model = write_chat_model(weights_dir / "model")
        engine = ScriptedEngine(model_path=model, token_s=0.001)
        await engine.start(lambda text: None)
        yield EngineCase(kind, engine, ScriptedReference(), ModelText(model), stream, has_model=False)
        await engine.stop()
        return
    if kind == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'prorl_hpc[vllm]'")
    reference = ModelReference(tiny_model, weights_dir)
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as runtime:
        made = make_vllm(tiny_model, Path(runtime), secret) if kind == "vllm" else _transformers(tiny_model, secret)
        await made.start(lambda text: None)
        try:
            yield EngineCase(kind, made, reference, ModelText(tiny_model), stream)
        finally:
            await made.stop()


def _transformers(tiny_model: Path, secret: Path) -> Engine:
    from prorl_hpc.inference.transformers_engine import TransformersEngine

    return TransformersEngine(tiny_model, EngineConfig(max_parallel_requests=16), CONTEXT, weight_secret=secret)


def make_vllm(tiny_model: Path, runtime: Path, secret: Path, restarts: int = 1) -> VllmEngine:
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
        weight_secret=secret,
    )
    return VllmEngine(lambda: VllmProcess(settings, runtime / "vllm.log"), "test-vllm", CONTEXT, restarts)
