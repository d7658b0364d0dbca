"""Where models lie, and what a directory must hold to be one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any


def prorl_home() -> Path:
    """This user's directory for things that outlive a run: ``$PRORL_HOME``, else ``$XDG_CACHE_HOME/prorl_hpc``,
    else ``~/.cache/prorl_hpc``. On a cluster it must be one that all nodes see."""
    if home := os.environ.get("PRORL_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")  # the XDG specification: relative paths are to be ignored
    return (Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache") / "prorl_hpc"


def prepared_model(name: str) -> Path:
    """Where ``prorl_hpc model prepare NAME`` puts its model; the directory exists once it is whole."""
    return prorl_home() / "models" / name


def hub_hint(setting: str, given: str) -> str:
    """What to do if ``given``, which is no directory, is the name of a model on a hub; "" if it does not look like one."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", given):
        return ""
    return (
        f". If {given} is its name on the Hugging Face hub: nothing is downloaded from there by itself. Get it with `hf download {given} "
        f"--local-dir DIR` (huggingface-cli download, before huggingface_hub 1.0; or git clone, with git-lfs), then {setting}=DIR"
    )


def check_model_dir(path: Path | str, *, weights: bool = True) -> None:
    """Raise ValueError unless ``path`` holds a causal LM that can be trained and served: config, weights, tokenizer and
    chat template; without ``weights`` the last two. Reads no weights and imports nothing heavy."""
    directory = Path(path)
    if not str(path) or not directory.is_dir():
        raise ValueError(
            f"model.path={path or '(empty)'} is not a directory: give a Hugging Face model directory, or choose a model that "
            "is prepared here (model.prepare, `prorl-hpc model list`)"
        )
    if weights:
        check_network(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"{directory} has no tokenizer.json: save the tokenizer there with transformers, "
            f"AutoTokenizer.from_pretrained(…).save_pretrained({str(directory)!r})"
        )
    if not _has_chat_template(directory):
        raise ValueError(
            f"{directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): agents "
            "speak in messages, so use an instruction-tuned model or put a template there"
        )


def vocabulary_of(directory: Path) -> dict[str, int]:
    """Token → id, added ones too, from tokenizer.json. ValueError if there is none, or it is not such a file."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{directory} has no tokenizer.json: its vocabulary cannot be compared")
    read = _check_json(file)
    try:
        words, added = read.get("model", {}).get("vocab", {}), read.get("added_tokens") or []
        known = dict(words) if isinstance(words, dict) else {entry[0]: i for i, entry in enumerate(words)}
        return known | {entry["content"]: entry["id"] for entry in added}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a tokenizer's: {type(error).__name__}: {error}") from error


def check_network(directory: Path) -> dict[str, Any]:
    """Raise ValueError unless configuration and weights are there and whole. Returns the configuration."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    config = _check_json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(
            f"{directory}/config.json has no model_type: it is not the configuration of a Hugging Face model"
        )
    if not any(directory.glob("*.safetensors")):
        other = sorted(p.name for kind in ("*.bin", "*.gguf", "*.pt", "*.pth") for p in directory.glob(kind))
        found = f"it has {', '.join(other[:3])}, which must be converted" if other else "the download may be incomplete"
        raise ValueError(f"{directory} has no weights (*.safetensors): {found}")
    _check_shards(directory)
    for weights in directory.glob("*.safetensors"):
        _check_whole(weights)
    return config


def _check_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def _check_shards(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = set(_check_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (directory / name).is_file())
        if missing:
            raise ValueError(
                f"{directory} lacks {len(missing)} of {len(named)} weight files that {index.name} names: {missing[0]}"
            )


def _check_whole(weights: Path) -> None:
    """A safetensors file is an 8-byte length, a JSON header of that length, and the tensors that it places."""
    size = weights.stat().st_size
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length < size else {}
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{weights} is not a safetensors file, or was cut short ({size} bytes): copy it again"
        ) from error
    if size != 8 + length + end:
        raise ValueError(f"{weights} has {size} bytes, its header speaks of {8 + length + end}: copy it again")


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and bool(_check_json(settings).get("chat_template"))


def vocab_size_of(config: dict[str, Any]) -> int | None:
    """What a model's config.json says, in its text part where it has parts: the ids that the model can write are smaller.
    None if it does not say."""
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
