"""Writing a directory of model files by all ranks: aside, each file with its checksum, whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.engine import Engine
from prorl_hpc.trainer.manifest import FileRecord, Sealing, sync, write_manifest
from prorl_hpc.trainer.removing import clear_away, discard
from prorl_hpc.trainer.weights import write_index, write_safetensors

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_SPARE_BYTES = 32 * 1024**2
"""For tokenizer, tables and the file system's own."""

_TORCH_CANNOT_WRITE = ("PytorchStreamWriter", "inline_container", "iostream")
"""In the RuntimeErrors that torch makes of a refusing disk."""


class CheckpointNotWritten(RunError):
    """Nothing of it is left; what was there before is as it was."""


class Writing:
    """Collective. ``name`` in ``parent`` comes to be when ``finish`` returns; after an error, nothing of it is left."""

    def __init__(self, engine: Engine, parent: Path, name: str) -> None:
        self._engine, self._parent = engine, parent
        self.final, self.aside = parent / name, parent / f".{name}.partial"
        self.lead = engine.rank == 0
        self.there: bool = self.from_lead(self.final.is_dir())
        self._sealing = Sealing()
        self._names: dict[Path, Path] = {}
        self._needed_bytes = 0

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sealing.__exit__(kind, error, trace)
        if error is not None and self.lead:
            shutil.rmtree(self.aside, ignore_errors=True)

    def begin(self, weight_bytes: int, states: list[Any], *directories: str) -> None:
        """Make room for the weights, once, and every rank's ``states``, and the directories."""
        own = sum(tensor.nbytes for tensor in _tensors(states))
        self._needed_bytes = weight_bytes + sum(self._of_all(own)) + _SPARE_BYTES

        def make() -> None:
            if not self.lead:
                return
            for pattern in (".*.partial", ".*.old"):  # whoever made them was killed
                for leftover in self._parent.glob(pattern):
                    clear_away(leftover)
            self.aside.mkdir(mode=0o700)
            for directory in directories:
                (self.aside / directory).mkdir(mode=0o700)
            if shutil.disk_usage(self._parent).free < self._needed_bytes:
                raise OSError("no space left on the disk")

        self.together(make)

    def together(self, work: Callable[[], None]) -> None:
        """Each rank does ``work``; raises CheckpointNotWritten on all of them if the disk of one refused."""
        trouble = ""
        try:
            work()
        except OSError as error:
            trouble = f"rank {self._engine.rank}: {error}"
        if told := [one for one in self._of_all(trouble) if one]:
            raise CheckpointNotWritten(
                f"{self.final} was not written: {'; '.join(told)}. It needs {_gib(self._needed_bytes)}, and {self._parent} has "
                f"{_gib(shutil.disk_usage(self._parent).free)} free (a quota may allow less); each of "
                "trainer.keep_checkpoints takes as much. Make room there, or mend what is told of a rank. What was saved before "
                "is whole"
            )

    # --- files ---

    def torch_save(self, value: Any, name: str) -> None:
        """Raises OSError."""
        path = self.aside / name
        torch.serialization.set_crc32_options(False)  # the manifest has a better checksum
        try:
            torch.save(value, path)
        except RuntimeError as error:
            if not any(mark in str(error) for mark in _TORCH_CANNOT_WRITE):
                raise
            raise OSError(f"{path}: {error}") from error
        self.seal(path)

    def json(self, name: str, value: Any) -> None:
        write_json(self.aside / name, value)
        self.seal(self.aside / name)

    def seal(self, path: Path) -> None:
        """Nothing in ``path`` changes any more, but perhaps its name."""
        self._sealing.add(path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file that was sealed its own name."""
        self._names[old] = old.rename(new)

    # --- the end ---

    def finish(self) -> None:
        """All files are on disk, the manifest is written, and the name is its own."""
        own: dict[str, FileRecord] = {}

        def settle() -> None:
            for path, record in self._sealing.records().items():
                own[str(self._names.get(path, path).relative_to(self.aside))] = record

        self.together(settle)
        files = {name: record for part in self._of_all(own) for name, record in part.items()}

        def appear() -> None:
            if self.lead:
                write_manifest(self.aside, files)
                for directory in {self.aside, *((self.aside / name).parent for name in files)}:
                    sync(directory)
                if os.path.lexists(self.final):  # a file, or a link to nowhere
                    self.final.rename(damaged_name(self.final))
                self.aside.rename(self.final)
                sync(self._parent)

        self.together(appear)

    # --- ranks ---

    def from_lead(self, value: Any) -> Any:
        if self._engine.world == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._engine.commands)
        return told[0]

    def _of_all(self, value: Any) -> list[Any]:
        if self._engine.world == 1:
            return [value]
        everybody: list[Any] = [None] * self._engine.world
        dist.all_gather_object(everybody, value, group=self._engine.commands)
        return everybody

    @property
    def engine(self) -> Engine:
        return self._engine


def write_model(writing: Writing, source: Path) -> None:
    """Collective: the engine's weights in Hugging Face's format, and what lies beside the weights in ``source``. Raises
    OSError."""
    engine, aside = writing.engine, writing.aside
    shards, where = write_safetensors(engine.weights(), aside, "model", write=writing.lead, written=writing.seal)
    if not writing.lead:
        return
    if len(shards) > 1:  # model-00001 → model-00001-of-00003, now that the count is known
        names = {old.name: f"{old.stem}-of-{len(shards):05d}.safetensors" for old in shards}
        for old in shards:
            writing.rename(old, old.with_name(names[old.name]))
        where = {tensor: names[name] for tensor, name in where.items()}
        shards = [old.with_name(names[old.name]) for old in shards]
    write_index(aside, shards, where)
    written = {path.name for path in shards}
    _copy_model_files(source, aside, str(engine.dtype).removeprefix("torch."))
    for path in aside.iterdir():
        if path.is_file() and path.name not in written:
            writing.seal(path)


def _copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Config, tokenizer, chat template and whatever else lies beside the weights; the config's dtype is the saved one."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = msgspec.json.decode((source / "config.json").read_bytes())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    encoded = msgspec.json.format(msgspec.json.encode(config | {key: dtype}), indent=2)
    (target / "config.json").write_bytes(encoded + b"\n")


def remove(path: Path) -> None:
    """Under another name first: what is there under its own is whole. What cannot be removed is told and left."""
    aside = path.with_name(f".{path.name}.old")
    try:
        discard(aside)
        if path.is_symlink():
            log.info("%s was a link: %s is left as it is", path, path.resolve())
        path.rename(aside)
        discard(aside)
    except OSError as error:
        log.warning("%s is no longer needed, and cannot be removed: %s", path, error)


def damaged_name(path: Path) -> Path:
    """Where to put what cannot be used, out of the way of what will be written in its place."""
    return path.with_name(f"{path.name}.damaged")


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
