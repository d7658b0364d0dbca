"""One copy of an image per node, near the sandboxes that start from it.

    <the node's runtime directory>/images/
        <digest>/          of one image; ``unpacked`` where it is a directory
            lock           flocked: exclusively by whoever makes the copy, shared by whoever uses it
            image.sif      or image/

A runtime directory is on the node itself, where flock holds and is released by the kernel however its holder dies. So a
copy that nobody holds is nobody's: the last user removes it, and what killed ones left goes at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import uuid
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.directories import remove_locked, remove_tree
from prorl_hpc.sandbox.file_systems import is_network
from prorl_hpc.sandbox.images.building import run_builder
from prorl_hpc.sandbox.images.cache import Entry
from prorl_hpc.sandbox.images.resolving import find
from prorl_hpc.sandbox.images.sif import check_sif, this_architecture
from prorl_hpc.sandbox.leftovers import is_ours

log = logging.getLogger(__name__)

_CHUNK = 1 << 22
_UNPACK_TIMEOUT_S = 1800.0
_LOCK = "lock"


class NodeImages:
    """The images of one worker. ``get`` may be called from several threads."""

    def __init__(self, config: SandboxConfig, runtime_dir: Path) -> None:
        self._config = config
        self._directory = runtime_dir / "images"
        self._paths: dict[str, Path] = {}
        self._held: list[int] = []
        self._one_at_a_time = threading.Lock()

    def get(self, image: str) -> Path:
        """The .sif file or directory to start for ``image`` (all but ``host``): this node's copy, where one is asked for.

        The first call for an image may take as long as copying it does: call it in a thread. Later ones cost nothing.
        SandboxError when there is no such image, it is damaged, or there is no room for the copy.
        """
        if (path := self._paths.get(image)) is not None:
            return path
        with self._one_at_a_time:
            if image not in self._paths:
                self._paths[image] = self._bring(image)
            return self._paths[image]

    def close(self) -> None:
        """Let go of the copies; those that no other worker uses are removed."""
        with self._one_at_a_time:
            self._paths.clear()
            while self._held:
                os.close(self._held.pop())
            if self._directory.is_dir():
                _remove_unused(self._directory)
                with contextlib.suppress(OSError):  # another worker's are there
                    self._directory.rmdir()

    def _bring(self, image: str) -> Path:
        path, entry = find(image, this_architecture())
        mode, unpack = self._config.copy_images, self._config.unpack_images
        if path.is_dir() or mode == "never" or (mode == "auto" and not unpack and not is_network(path)):
            return path
        try:
            return self._copy(path, entry, unpack)
        except OSError as error:
            why = f"image {path} cannot be copied to {self._directory}: {error.strerror or error}"
            if mode == "auto" and not unpack:
                log.warning("%s; sandboxes start from where it lies, which is slower", why)
                return path
            raise SandboxError(
                f"{why}. Make room there, choose another run.runtime_root, or set sandbox.copy_images=never"
            ) from error

    def _copy(self, source: Path, entry: Entry | None, unpack: bool) -> Path:
        info = source.stat()
        place = f"{source}\0{info.st_size}\0{info.st_mtime_ns}"
        digest = entry.sha256 if entry else hashlib.sha256(place.encode()).hexdigest()
        home = self._directory / f"{digest[:24]}{'-unpacked' if unpack else ''}"
        target = home / ("image" if unpack else "image.sif")
        lock, to_be_made = _hold(home, target)
        try:
            if to_be_made:
                log.info("copying image %s to %s", source, target)
                _make(source, entry, target)
                fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            _remove_unused(self._directory)
            raise
        self._held.append(lock)
        return target


def sweep_copies(runtime_dir: Path) -> list[Path]:
    """Remove copies that dead workers of this user left in other runs' directories beside this one; returns them."""
    removed = []
    for directory in runtime_dir.parent.glob(f"prorl-{os.getuid()}-*/images"):
        if directory.parent != runtime_dir and is_ours(directory.parent) and is_ours(directory):
            removed += _remove_unused(directory)
            with contextlib.suppress(OSError):  # some are in use
                directory.rmdir()
    return removed


def _hold(home: Path, target: Path) -> tuple[int, bool]:
    """The open lock: shared when the copy is there, exclusive when it is to be made (True). Waits for who makes it."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # its last user removes it right now
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
                alone = False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), (home / _LOCK).stat()) and (alone or target.exists()):
                    fcntl.flock(lock, fcntl.LOCK_SH if target.exists() else fcntl.LOCK_EX)
                    return lock, not target.exists()
            os.close(lock)  # it was removed while we waited, or who made it failed


def _make(source: Path, entry: Entry | None, target: Path) -> None:
    part = target.with_name("part.sif")
    _copy_checked(source, part, entry)
    if target.suffix != ".sif":
        directory = target.with_name("part")
        _unpack(part, directory)
        part.unlink()
        part = directory
    part.rename(target)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []  # another worker has just removed it


def _remove_unused(directory: Path) -> list[Path]:
    removed = []
    for home in _entries(directory):
        try:
            lock = os.open(home / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # being made, or being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = home.with_name(f"gone-{uuid.uuid4().hex}")
            home.rename(gone)  # at once: who comes for it now makes a new one
            remove_locked(gone, _LOCK)
            removed.append(home)
        except (BlockingIOError, FileNotFoundError):
            pass  # in use, or another was faster
        except SandboxError as error:
            log.error("a copy of an image that nobody uses stays: %s", error)
        finally:
            os.close(lock)
    return removed


def _copy_checked(source: Path, part: Path, entry: Entry | None) -> None:
    """Copy, and compare what arrived with the cache's checksum on the way. OSError for a lack of room."""
    digest = hashlib.sha256()
    with source.open("rb") as read, part.open("wb") as write:
        while chunk := read.read(_CHUNK):
            digest.update(chunk)
            write.write(chunk)
    if entry and digest.hexdigest() != entry.sha256:
        raise SandboxError(
            f"image {source} has another checksum than when it was made, so it is damaged: `prorl-hpc image verify "
            f"{entry.name}` tells how to make it again"
        )
    check_sif(part, this_architecture())


def _unpack(sif: Path, target: Path) -> None:
    if target.exists():
        remove_tree(target)
    request = {"what": "build", "binary": find_binary(), "source": str(sif), "target": str(target), "sandbox": True}
    run_builder(request, log.debug, _UNPACK_TIMEOUT_S, subject=f"the unpacking of {sif}")
