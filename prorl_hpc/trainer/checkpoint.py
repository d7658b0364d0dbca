"""Checkpoints that transformers loads, vLLM serves and a run resumes from.

``checkpoints/step-N/`` is a Hugging Face model directory; ``trainer_state/`` in it holds the rest: optimizer,
random state, step and data cursor. A checkpoint is written under another name and renamed when it is whole and on
disk: neither a kill nor a node that fails leaves half of one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.engine import Engine
from prorl_hpc.trainer.weights import write_index, write_safetensors

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
STATE_DIRECTORY = "trainer_state"


class Position(msgspec.Struct, frozen=True):
    """Where training stands: ``step`` optimizer steps done, ``cursor`` rows of the endless shuffled data used up."""

    step: int = 0
    cursor: int = 0


class SavedState(msgspec.Struct, frozen=True):
    """``trainer_state/state.json``; what optimizer files fit to."""

    position: Position
    world: int
    zero_stage: int
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: SavedState


def step_directory(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def all_checkpoints(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [p for p in checkpoints.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def latest(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint that can be resumed from, or None."""
    for path in reversed(all_checkpoints(checkpoints)):
        state = read_json(path / STATE_DIRECTORY / "state.json", SavedState)
        if state is not None:
            return Checkpoint(path, state)
    return None


def save(engine: Engine, checkpoints: Path, model_directory: Path, position: Position, keep: int) -> Path:
    """Collective: write step-N and prune older ones. A step that is already saved is left alone."""
    final = step_directory(checkpoints, position.step)
    lead = engine.rank == 0
    aside = checkpoints / f".{final.name}.partial"
    needed = [not final.exists()]
    dist.broadcast_object_list(needed, src=0, group=engine.commands)
    if not needed[0]:
        return final
    if lead:
        for leftover in checkpoints.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        (aside / STATE_DIRECTORY).mkdir(mode=0o700, parents=True)
    dist.barrier(group=engine.commands)
    # Checksums of a gigabyte would take most of the seconds that a stop has; a torn file is never renamed into place.
    torch.serialization.set_crc32_options(False)
    state_file = aside / STATE_DIRECTORY / f"rank-{engine.rank:05d}.pt"
    torch.save({"optimizer": engine.optimizer_state(), "torch_rng": torch.get_rng_state()}, state_file)
    _sync(state_file)
    shards, where = write_safetensors(engine.weights(), aside, "model", write=lead)
    if lead:
        shards, where = _hugging_face_names(shards, where)
        write_index(aside, shards, where)
        _copy_model_files(model_directory, aside, str(engine.dtype).removeprefix("torch."))
        state = SavedState(position, engine.world, engine.stage, str(engine.dtype))
        write_json(aside / STATE_DIRECTORY / "state.json", state)
        for path in (*shards, aside / STATE_DIRECTORY, aside):
            _sync(path)
    dist.barrier(group=engine.commands)
    if lead:
        aside.rename(final)
        _sync(checkpoints)
        _prune(checkpoints, keep)
    return final


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hugging_face_names(shards: list[Path], where: dict[str, str]) -> tuple[list[Path], dict[str, str]]:
    """model-00001.safetensors → model-00001-of-00003.safetensors, now that the count is known."""
    if len(shards) == 1:
        return shards, where
    names = {old.name: f"{old.stem}-of-{len(shards):05d}.safetensors" for old in shards}
    renamed = [old.rename(old.with_name(names[old.name])) for old in shards]
    return renamed, {tensor: names[name] for tensor, name in where.items()}


def _copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Config, tokenizer, chat template and whatever else lies beside the weights; the config's dtype is the saved one."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = msgspec.json.decode((source / "config.json").read_bytes())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    encoded = msgspec.json.format(msgspec.json.encode(config | {key: dtype}), indent=2)
    (target / "config.json").write_bytes(encoded + b"\n")


def _prune(checkpoints: Path, keep: int) -> None:
    """Keep the newest ``keep`` models; only the newest keeps its trainer state, which is twice as large."""
    *older, _ = all_checkpoints(checkpoints)
    for path in older[: max(0, len(older) + 1 - keep)]:
        shutil.rmtree(path)
    for path in older[max(0, len(older) + 1 - keep) :]:
        shutil.rmtree(path / STATE_DIRECTORY, ignore_errors=True)


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Collective: load the optimizer and random state; the engine was made from the checkpoint's weights."""
    saved = checkpoint.state
    now = SavedState(saved.position, engine.world, engine.stage, str(engine.dtype))
    if saved != now:
        raise RunError(
            f"{checkpoint.path} was saved by {saved.world} trainer rank(s) with ZeRO stage {saved.zero_stage} in {saved.dtype}, "
            f"this run has {now.world}, stage {now.zero_stage} and {now.dtype}: resume with the same settings, "
            f"or start a new run with model=path model.path={checkpoint.path}"
        )
    file = checkpoint.path / STATE_DIRECTORY / f"rank-{engine.rank:05d}.pt"
    # weights_only=False: DeepSpeed's state holds objects of its own; the run directory is ours alone (0700).
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    engine.load_optimizer_state(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
