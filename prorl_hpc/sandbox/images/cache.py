"""The cache of images: ``prorl_home()/images``, on storage that all nodes see.

NAME.sif      an image; there only when it is whole
NAME.json     what is known of it (Entry); an image without it is a leftover, and is made again
.NAME.lock/   somebody makes NAME now (entry_lock), and writes it in there
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.entry_lock import break_dead, entry_lock, lock_owner, lock_path, remove_aside
from prorl_hpc.sandbox.images.references import check_name, is_name
from prorl_hpc.sandbox.images.sif import check_sif

Progress = Callable[[str], None]
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the cache knows of an image."""

    name: str
    reference: str
    """Where it came from: a reference, or the path of a definition or Dockerfile."""
    kind: str
    """docker, oras, …, definition or dockerfile."""
    sha256: str
    """Of the file."""
    size: int
    """Bytes."""
    created: float
    """Seconds since the epoch."""
    built_by: str
    """The builder and its version."""
    architecture: str
    source_sha256: str = ""
    """Of the definition's text; empty for what was pulled."""
    labels: dict[str, str] = field(default_factory=dict)


class ImageCache:
    """All methods raise SandboxError with what to do."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or prorl_home() / "images"

    def path(self, name: str) -> Path:
        return self.directory / f"{check_name(name)}.sif"

    def find(self, name: str) -> Entry | None:
        """None when it is not there, or not whole. Costs two looks at the file system, reads no image."""
        entry = _read_entry(self.directory / f"{check_name(name)}.json")
        try:
            size = self.path(name).stat().st_size
        except FileNotFoundError:
            return None
        return entry if entry and entry.size == size else None

    def entries(self) -> list[Entry]:
        """By name."""
        names = sorted(path.stem for path in self.directory.glob("*.json"))
        return [entry for entry in (self.find(name) for name in names) if entry]

    def names(self) -> list[str]:
        """Of all that lies there and could be an image, sound or not."""
        found = {path.stem for kind in ("*.sif", "*.json") for path in self.directory.glob(kind)}
        return sorted(name for name in found if is_name(name))

    @contextlib.contextmanager
    def making(self, name: str, progress: Progress, stop: threading.Event | None = None) -> Iterator[Path]:
        """Hold the lock of ``name``: nobody else in the cluster makes it. Yields where to write, for ``publish``."""
        check_name(name)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(f"the image cache {self.directory} cannot be made: {error}; set $PRORL_HOME") from error
        self.sweep()
        with entry_lock(self.directory, name, progress, stop) as aside:
            yield aside

    def publish(self, aside: Path, name: str, *, reference: str, kind: str, built_by: str, **more: Any) -> Entry:
        """Check what was written within ``making``, and give it its name."""
        taken_over = SandboxError(
            f"image {name} was taken over by another process, since this one gave no sign of life for two minutes: look at "
            "it with `prorl-hpc image list`"
        )
        if lock_owner(aside.parent) != aside.stem:
            raise taken_over
        sif = check_sif(aside)
        entry = Entry(
            name=name,
            reference=reference,
            kind=kind,
            sha256=file_sha256(aside),
            size=sif.size,
            created=time.time(),
            built_by=built_by,
            architecture=sif.architecture,
            **more,
        )
        # The old description goes first: at no time does one stand beside another's image.
        record = self.directory / f"{name}.json"
        described = aside.with_suffix(".json")
        try:
            aside.chmod(0o644)
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            described.write_text(json.dumps(asdict(entry), indent=1, sort_keys=True) + "\n")
            record.unlink(missing_ok=True)
            aside.rename(self.path(name))
            described.rename(record)
        except FileNotFoundError:
            raise taken_over from None
        except OSError as error:
            raise SandboxError(f"image {name} cannot be put into the cache: {error}") from error
        return entry

    def verify(self, name: str) -> Entry:
        """Read all of an image; SandboxError says what is wrong with it."""
        entry = _read_entry(self.directory / f"{check_name(name)}.json")
        path = self.path(name)
        if entry is None:
            raise SandboxError(self.why_absent(name) or f"there is no image {name} in {self.directory}")
        again = f"make it again: {self.command_for(entry)}"
        try:
            sif = check_sif(path)
        except SandboxError as error:
            raise SandboxError(f"{error}\n{again}") from None
        if sif.size != entry.size:
            raise SandboxError(self.why_absent(name))
        if file_sha256(path) != entry.sha256:
            raise SandboxError(
                f"image {path} has another checksum: it was damaged or changed after it was made; {again}"
            )
        return entry

    def why_absent(self, name: str) -> str:
        """Why what lies there under ``name`` is no image of the cache; empty when nothing lies there."""
        path = self.path(name)
        if not path.exists():
            return ""
        entry = _read_entry(self.directory / f"{name}.json")
        if entry is None:
            return (
                f"{path} has no readable {name}.json: it was not made whole, or was put there by hand. Remove it with "
                f"`prorl-hpc image remove {name}`, and pull or build it again; or move it elsewhere, and name it by its path"
            )
        return (
            f"image {path} has {path.stat().st_size} bytes instead of {entry.size}: it was damaged or changed after it was made; "
            f"make it again: {self.command_for(entry)}"
        )

    def command_for(self, entry: Entry) -> str:
        """What makes an entry again."""
        if entry.kind in ("definition", "dockerfile"):
            return f"prorl-hpc image build --force --name {entry.name} {entry.reference}"
        return f"prorl-hpc image pull --force {entry.reference}"

    def remove(self, name: str) -> int:
        """Returns the bytes that are free now. A sandbox that runs on it keeps its node's copy."""
        path = self.path(name)
        if name not in self.names():
            raise SandboxError(f"there is no image {name} in {self.directory}")
        size = path.stat().st_size if path.exists() else 0
        try:
            (self.directory / f"{name}.json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SandboxError(f"image {name} cannot be removed: {error}") from error
        return size

    def sweep(self) -> list[str]:
        """Remove what dead processes of this node left, and what could not be removed earlier; returns the names."""
        for trash in self.directory.glob(".trash-*"):
            remove_aside(trash)
        locks = [path for path in self.directory.glob(".*.lock") if break_dead(path)]
        return [path.name[1:].removesuffix(".lock") for path in locks]

    def is_being_made(self, name: str) -> bool:
        return lock_path(self.directory, name).exists()


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read_entry(path: Path) -> Entry | None:
    try:
        content = json.loads(path.read_text())
        known = {f.name for f in fields(Entry)}
        return Entry(**{key: value for key, value in content.items() if key in known})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # not readable is as good as absent: the image is made again
