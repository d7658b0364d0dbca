"""Weights as safetensors files with Hugging Face names, written aside and renamed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from prorl_hpc.messages.codec import write_json

MAX_SHARD_BYTES = 5 * 1024**3


def write_safetensors(
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    stem: str,
    *,
    write: bool = True,
    written: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Path], dict[str, str]]:
    """Write ``<stem>.safetensors``, or ``<stem>-00001.safetensors``, … where one file would pass 5 GiB. Returns the files
    and the file of each tensor. Ranks with ``write`` False only walk through ``weights``, which may be collective. Each
    file that is whole is given to ``written`` before the next is begun.

    Raises OSError if a file cannot be written, after the walk, for the other ranks go on with it."""
    walk = iter(weights)
    try:
        return _write_shards(walk, directory, stem, write, written)
    except (OSError, SafetensorError) as error:
        deque(walk, maxlen=0)
        raise error if isinstance(error, OSError) else OSError(f"{directory}: {error}") from error


def _write_shards(
    weights: Iterator[tuple[str, Tensor]], directory: Path, stem: str, write: bool, written: Callable[[Path], None]
) -> tuple[list[Path], dict[str, str]]:
    shards: list[Path] = []
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    size = 0

    def flush(last: bool) -> None:
        nonlocal held, size
        single = last and not shards
        path = directory / (f"{stem}.safetensors" if single else f"{stem}-{len(shards) + 1:05d}.safetensors")
        _save(held, path)
        shards.append(path)
        written(path)
        where.update(dict.fromkeys(held, path.name))
        held, size = {}, 0

    for name, tensor in weights:
        if not write:
            continue
        if held and size + tensor.nbytes > MAX_SHARD_BYTES:
            flush(last=False)
        # A view of the live weights suffices on a CPU, where nothing changes them meanwhile, unless it is a gathered one.
        held[name] = _stable(tensor)
        size += tensor.nbytes
    if write:
        flush(last=True)
    return shards, where


def _stable(tensor: Tensor) -> Tensor:
    gathered = hasattr(tensor, "ds_id") or tensor.device.type != "cpu"
    return tensor.to("cpu", copy=True) if gathered else tensor.contiguous()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    aside = path.with_name(f".{path.name}.partial")
    with torch.no_grad():
        save_file(tensors, aside, metadata={"format": "pt"})
    aside.chmod(0o600)
    aside.replace(path)


def write_index(directory: Path, shards: list[Path], where: dict[str, str]) -> None:
    """``model.safetensors.index.json``, where the weights are in several files."""
    if len(shards) > 1:
        total = sum(path.stat().st_size for path in shards)
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
