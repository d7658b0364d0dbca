"""How a running vLLM server gets new weights: a weight-transfer backend that reads safetensors files, or the trainer's
own stream.

vLLM loads ``register`` in each of its processes (entry point ``vllm.general_plugins``). The trainer leaves
files on storage that this node reads, tmpfs where it can, or listens for who asks; the engine posts where. Works on CPU
and GPU, with any tensor parallelism: every rank reads all and keeps its share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.inference.parent_watch import end_with_parent
from prorl_hpc.messages.inference import WeightSource, WeightUpdate

BACKEND = "prorl_weights"

log = logging.getLogger("vllm.prorl_hpc.weights")


def register() -> None:
    """Make the backend known to vLLM, and let its process end with its parent; called once per process, and harmless if
    called again."""
    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _receiver_class())


def update_info(update: WeightUpdate, key_file: Path | None) -> dict[str, Any]:
    """What the engine posts to ``/update_weights``; ``key_file`` goes with a source."""
    if update.source is None:
        return {"paths": update.paths}
    return {"source": msgspec.to_builtins(update.source), "key_file": str(key_file)}


def _tensors(paths: list[str]) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, CPU tensor) pairs of all files, one tensor in memory at a time."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no dict
                yield name, file.get_tensor(name)


def refresh_tied_lm_head(model: Any, text_config: Any) -> None:
    """Make a tied output head see the new embedding.

    On CPU, vLLM packs the head's matrix for oneDNN when the model is loaded. A tied head gets no tensor of its
    own from a checkpoint, so a layer-wise reload never packs it again: it answers with the old weights, silently.
    Running the head's own post-load step anew packs the current ones. Without packing (GPUs) there is
    nothing to refresh, since head and embedding share one tensor.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = getattr(text_config, "tie_word_embeddings", False)
    if not tied or head is None or embedding is None or head is embedding:
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def _receiver_class() -> type:
    """The backend's class; made on demand because its base class needs vLLM, which only the server imports."""
    import torch
    from vllm.distributed.weight_transfer import base
    from vllm.model_executor.model_loader import reload

    from prorl_hpc.inference.streamed_weights import streamed_tensors

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing to agree on beforehand."""

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        """safetensors files that together hold the whole model, or a WeightSource and the secret that it wants proved."""

        paths: list[str] = field(default_factory=list)
        source: dict[str, Any] | None = None
        key_file: str = ""

    class WeightReceiver(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # not the base class's: that one synchronizes an accelerator, which a CPU has not
            try:
                self.receive_weights(self.parse_update_info(update_info))
            except BaseException:
                # layers not yet loaded get their old tensors back; a model on the meta device would
                # take the server down at its next token
                self.finish_weight_update()
                raise
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            began = time.monotonic()
            if update_info.source is not None:
                source = msgspec.convert(update_info.source, WeightSource)
                tensors = streamed_tensors(source, Path(update_info.key_file))
            else:
                tensors = _tensors(update_info.paths)
            loaded = set(self.model.load_weights(tensors) or ())
            if not loaded:
                raise ValueError("no tensor of the new weights has a name that this model knows")
            log.info("loaded %d tensors in %.2f s", len(loaded), time.monotonic() - began)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                refresh_tied_lm_head(self.model, self.model_config.hf_text_config)

        def shutdown(self) -> None:
            pass

    return WeightReceiver
