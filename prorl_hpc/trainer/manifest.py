"""``manifest.json`` of a checkpoint: size and SHA-256 of every file in it.

SHA-256, since processors compute it (1 to 2 GiB/s and core; BLAKE2b comes to a third, and CRC-32 gains half as much again
and says nothing of a file that somebody altered). A file's checksum is taken in a thread while the file is brought to disk
and the next one is written, so that it costs a stop next to nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from prorl_hpc.messages.codec import read_json, write_json

MANIFEST = "manifest.json"
SINGLE_WEIGHT_FILE, WEIGHT_INDEX = "model.safetensors", "model.safetensors.index.json"
_THREADS = 4


class FileRecord(msgspec.Struct, frozen=True):
    """``size`` in bytes; ``sha256`` in hexadecimal."""

    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size} bytes, sha256 {self.sha256[:16]}…"


class Manifest(msgspec.Struct, frozen=True):
    """``files``: by path, relative to the manifest's directory."""

    files: dict[str, FileRecord]


class WeightIndex(msgspec.Struct, frozen=True):
    """Hugging Face's ``model.safetensors.index.json``. ``weight_map``: each tensor's file."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class _Sealed:
    path: Path
    fd: int
    record: Future[FileRecord]
    synced: Future[None]


class Sealing:
    """Brings finished files to disk and takes their checksums, in threads beside the one that writes them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sealing")
        self._files: list[_Sealed] = []

    def __enter__(self) -> Sealing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files:
            os.close(file.fd)

    def add(self, path: Path) -> None:
        """``path`` is whole; it may be renamed from now on, and not changed."""
        fd = os.open(path, os.O_RDONLY)
        self._files.append(_Sealed(path, fd, self._pool.submit(_record, fd), self._pool.submit(os.fsync, fd)))

    def records(self) -> dict[Path, FileRecord]:
        """When all are on disk: what they are, by the paths given. Raises the OSError of one that is not."""
        for file in self._files:
            file.synced.result()
        return {file.path: file.record.result() for file in self._files}


def _record(fd: int) -> FileRecord:
    """Reads by place, not from where the descriptor stands: another thread may use it."""
    digest, size = hashlib.sha256(), 0
    while chunk := os.pread(fd, 1 << 22, size):
        digest.update(chunk)
        size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def sync(path: Path) -> None:
    """Bring a file, or a directory's list of names, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_manifest(directory: Path, files: dict[str, FileRecord]) -> None:
    """``manifest.json``, on disk when this returns."""
    write_json(directory / MANIFEST, Manifest(dict(sorted(files.items()))))
    sync(directory / MANIFEST)


def read_manifest(directory: Path) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    try:
        manifest = read_json(directory / MANIFEST, Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{directory / MANIFEST} cannot be read: {error}"
    return manifest if manifest is not None else f"{directory / MANIFEST} is not there: expected the list of its files"


def damage(directory: Path) -> list[str]:
    """What is not as ``manifest.json`` says: file, expected, found; or that it lists no model's weights. Empty: the directory is
    as it was written."""
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        return [manifest]
    expected = {directory / name: record for name, record in manifest.files.items()}
    wrong = [w for path, record in expected.items() if (w := _wrong_size(path, record))]
    wrong = wrong or list(_altered(expected.items()))
    return wrong or _not_listed(directory, manifest, _weight_files(directory, manifest))


def lacking(directory: Path, files: Iterable[str]) -> list[str]:
    """Which of ``files`` the directory's manifest, if it can be read, does not list."""
    manifest = read_manifest(directory)
    return [manifest] if isinstance(manifest, str) else _not_listed(directory, manifest, files)


def _not_listed(directory: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    return [f"{directory / name}: not in {MANIFEST}" for name in files if name not in manifest.files]


def _weight_files(directory: Path, manifest: Manifest) -> list[str]:
    """Those of the model: one, or the shards that its index names."""
    if WEIGHT_INDEX not in manifest.files:
        return [SINGLE_WEIGHT_FILE]
    index = msgspec.json.decode((directory / WEIGHT_INDEX).read_bytes(), type=WeightIndex)
    return sorted(set(index.weight_map.values()))


def _wrong_size(path: Path, expected: FileRecord) -> str:
    """Asked of all first: it costs nothing, and a torn file has the wrong one."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: expected {expected}; found {error.strerror}"
    return f"{path}: expected {expected}; found {size} bytes" if size != expected.size else ""


def _altered(expected: Iterable[tuple[Path, FileRecord]]) -> Iterable[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        pairs = list(expected)
        for (path, record), found in zip(pairs, pool.map(_look, (path for path, _ in pairs)), strict=True):
            if found != record:
                yield f"{path}: expected {record}; found {found}"


def _look(path: Path) -> FileRecord | str:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return _record(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return str(error.strerror)
