"""The directories of sandboxes on a node, and who holds them (leftovers.py: how those of dead workers are found).

    <runtime_root>/prorl-<uid>-<run and node>/     the node's runtime directory
        sb-<pid>-<n>/                              a Holding: all sandboxes of one runtime
            holder.lock                            locked as long as the process lives
            image/                                 the ``host`` image, where it is used
            base/                                  what becomes /.prorl in containers
            <n>/                                   a Box
                work/ tmp/ s/ log session groups sockets/ over/

The kernel frees the lock when the holder dies, however it dies and whatever PID namespace it was in.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError

MARKER = "PRORL_SANDBOX"
"""Environment variable that names a process's Box; how processes of a lost sandbox are recognized."""
LOCK = "holder.lock"
NEW_LOCK = "lock.new"
MAX_SOCKET_PATH = 107
"""Bytes that the kernel takes for the path of a Unix socket."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_numbers = itertools.count()


@dataclass(frozen=True)
class Box:
    """The files of one sandbox."""

    path: Path

    @property
    def workspace(self) -> Path:
        return self.path / "work"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    @property
    def socket_dir(self) -> Path:
        return self.path / "s"

    @property
    def socket(self) -> Path:
        return self.socket_dir / "t"

    @property
    def log(self) -> Path:
        """Stderr of the sandbox's process: why it did not start."""
        return self.path / "log"

    @property
    def session(self) -> Path:
        """Id and start of the sandbox's process, whose session all of its helpers stay in (see leftovers.py)."""
        return self.path / "session"

    @property
    def groups(self) -> Path:
        """Its control groups, where it has some (see cgroups.py)."""
        return self.path / "groups"

    @property
    def sockets(self) -> Path:
        """Mount points of the node's sockets that the sandbox may connect to."""
        return self.path / "sockets"

    @property
    def overlay(self) -> Path:
        """What is written over the image, where all of it may be written."""
        return self.path / "over"

    def last_words(self) -> str:
        """The end of the log; nothing when the Box was removed already."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
            return file.read().decode(errors="replace").strip()


class Holding:
    """The directory of one runtime's sandboxes, held as long as this process lives."""

    def __init__(self, runtime_dir: Path) -> None:
        try:
            self.path = _make_free_directory(runtime_dir)
            self._lock = _lock(self.path)
        except OSError as error:
            raise SandboxError(
                f"the runtime directory of sandboxes cannot be made: {error}{space_left(runtime_dir)}; "
                "run.runtime_root chooses another place"
            ) from error
        self._boxes = itertools.count(1)

    def make_box(self) -> Box:
        """A new one, with a name that is short: socket paths are limited. SandboxError when it cannot be made."""
        box = Box(self.path / str(next(self._boxes)))
        if (length := len(os.fsencode(box.socket))) > MAX_SOCKET_PATH:
            raise SandboxError(
                f"the path of a sandbox's socket is too long: {length} bytes ({box.socket}), the kernel takes "
                f"{MAX_SOCKET_PATH}: choose a shorter run.runtime_root, such as /tmp"
            )
        try:
            for directory in (box.path, box.workspace, box.tmp, box.socket_dir):
                directory.mkdir(mode=0o700)
        except OSError as error:
            shutil.rmtree(box.path, ignore_errors=True)
            raise SandboxError(f"no directory for a sandbox can be made: {error}{space_left(self.path)}") from error
        return box

    def release(self) -> None:
        """Remove it all."""
        remove_locked(self.path, LOCK)
        os.close(self._lock)


def _make_free_directory(runtime_dir: Path) -> Path:
    while True:
        path = runtime_dir / f"sb-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue  # of a process in another PID namespace, or in an earlier one, with the same id
        return path


def _lock(holding: Path) -> int:
    """The open lock. It is locked before it has its name: a sweeper must not find it in between."""
    fresh = holding / NEW_LOCK
    try:
        lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(holding / LOCK)
    except OSError:
        remove_tree(holding)
        raise
    return lock


def remove_locked(path: Path, lock: str) -> None:
    """A directory of ours, and its lock last: a removal that a kill cuts short is the next sweep's. SandboxError when
    something stays."""
    try:
        entries = list(path.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        elif entry.name != lock:
            entry.unlink()
    remove_tree(path)


def space_left(path: Path) -> str:
    """For the reasons of failures: ``; the file system of PATH is full: …``, or nothing where it is not."""
    place = next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # noqa: PTH110  (never raises)
    info = os.statvfs(place)
    free_mib = info.f_bavail * info.f_frsize >> 20
    if free_mib < 32:
        return f"; the file system of {place} is full ({free_mib} MiB free): make room there"
    if info.f_files and not info.f_favail:
        return f"; the file system of {place} has no inodes left: remove files there"
    return ""


def words_of(error: Exception) -> str:
    """What it says; when a copy of many files failed, for the first of them."""
    many = error.args[0] if isinstance(error, shutil.Error) else None
    return str(many[0][2]) if isinstance(many, list) else str(error)


def remove_tree(path: Path) -> None:
    """Remove a directory, whatever modes its content was given and however deep it goes. SandboxError when something
    stays. Nobody may be at work in it."""
    if not os.path.lexists(path):
        return
    try:
        path.chmod(0o700)
        top = os.open(path, _DIRECTORY)
        try:
            numbers = itertools.count()
            # Every directory is emptied at the top, where its own directories move to: paths stay short, and neither
            # stack nor file descriptors grow with the depth, which the agent chooses.
            while entries := _entries(top):
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        _dissolve(top, entry.name, numbers)
                    else:
                        os.unlink(entry.name, dir_fd=top)
        finally:
            os.close(top)
        path.rmdir()
    except OSError as error:
        raise SandboxError(f"{path} cannot be removed ({error}): remove it by hand") from error


def _entries(directory: int) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)


def _dissolve(top: int, name: str, numbers: Iterator[int]) -> None:
    os.chmod(name, 0o700, dir_fd=top)
    directory = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for entry in _entries(directory):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=directory)
                _move(entry.name, directory, top, numbers)
            else:
                os.unlink(entry.name, dir_fd=directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=top)


def _move(name: str, source: int, target: int, numbers: Iterator[int]) -> None:
    """To a name that is free, whatever names were chosen there to keep us from it."""
    while True:
        try:
            os.rename(name, f".removed-{next(numbers)}", src_dir_fd=source, dst_dir_fd=target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return
