"""Which model and vocabulary a directory holds, so that two servers, or a server and what it was before, can be compared.

Weights are not part of it: training changes them. Nothing is imported that a login node has not.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_hpc.config.model_directory import vocab_size_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
_PASSING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of config.json that a model keeps or changes when it is only saved again."""


@dataclass(frozen=True)
class ModelIdentity:
    """``fingerprint``: of architecture and tokenizer. ``vocab_size``: ids that the model can write are smaller; 0: not
    known. Empty: there is no model (a scripted engine without one)."""

    fingerprint: str = ""
    vocab_size: int = 0


def identify_model(directory: Path) -> ModelIdentity:
    """Of a Hugging Face model directory, from its small files. A directory that lacks them has an empty identity."""
    digest = hashlib.sha256()
    config = _config(directory)
    digest.update(json.dumps({k: v for k, v in config.items() if k not in _PASSING}, sort_keys=True).encode())
    found = [file for name in _TOKENIZER_FILES if (file := directory / name).is_file()]
    for file in found:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    if not config and not found:
        return ModelIdentity()
    return ModelIdentity(digest.hexdigest()[:16], vocab_size_of(config) or 0)


def _config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    read = json.loads(file.read_bytes()) if file.is_file() else {}
    return read if isinstance(read, dict) else {}
