"""The directories of sandboxes on a node, who holds them, and how those of dead workers are found.

    <runtime_root>/prorl-<uid>-<run and node>/     the node's runtime directory
        sb-<pid>-<n>/                              a Holding: all sandboxes of one runtime
            holder.lock                            locked as long as the process lives
            image/                                 the ``host`` image, where it is used
            <hash of the sandbox id>/              a Box
                work/ tmp/ s/ log

The kernel frees the lock when the holder dies, however it dies and whatever PID namespace it was in; only what
bears these names, belongs to this user and is not locked is ever swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from prorl_hpc.messages.errors import SandboxError

log = logging.getLogger(__name__)

MARKER = "PRORL_SANDBOX"
"""Environment variable that names a process's Box; how processes of a lost sandbox are recognized."""
_LOCK = "holder.lock"
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
        self.path = _make_free_directory(runtime_dir)
        # Locked before it has its name: a sweeper must not find it in between.
        fresh = self.path / "lock.new"
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(self.path / _LOCK)

    def make_box(self, sandbox_id: str) -> Box:
        """Its name is short whatever the id: socket paths are limited."""
        box = Box(self.path / hashlib.sha256(sandbox_id.encode()).hexdigest()[:8])
        try:
            box.path.mkdir(mode=0o700)
        except FileExistsError:
            raise SandboxError(
                f"there is a sandbox {sandbox_id!r} already, or it was not stopped: {box.path}"
            ) from None
        for directory in (box.workspace, box.tmp, box.socket_dir):
            directory.mkdir(mode=0o700)
        return box

    def release(self) -> None:
        """Remove it all."""
        remove_tree(self.path)
        os.close(self._lock)


def _make_free_directory(runtime_dir: Path) -> Path:
    while True:
        path = runtime_dir / f"sb-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue  # of a process in another PID namespace, or in an earlier one, with the same id
        return path


def remove_tree(path: Path) -> None:
    """Remove a directory whatever modes its content was given; SandboxError when something stays."""

    def make_removable(function: Callable[..., Any], name: str, _: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed is found below
            Path(name).parent.chmod(0o700)
            if not Path(name).is_symlink():
                Path(name).chmod(0o700)
            if function in (os.rmdir, os.unlink):
                function(name)
            else:
                shutil.rmtree(name, ignore_errors=True)

    # A second pass gets what lies below a directory that was closed at first.
    for _ in range(2):
        if os.path.lexists(path):
            shutil.rmtree(path, onerror=make_removable)
    if os.path.lexists(path):
        left = next((str(p) for p in path.rglob("*") if not p.is_dir()), str(path))
        raise SandboxError(f"{path} cannot be removed (for example {left}): remove it by hand")


def marked_processes(path: Path) -> Iterator[psutil.Process]:
    """Processes of this user whose environment names ``path`` or a Box below it."""
    needle = f"\0{MARKER}={path}".encode()
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ")
            if environment.stat().st_uid == os.getuid():
                content = b"\0" + environment.read_bytes() + b"\0"
                if needle + b"/" in content or needle + b"\0" in content:
                    yield process
        except OSError:
            continue  # it ended, or is not ours to look at


def kill_marked(path: Path) -> list[int]:
    """SIGTERM, then SIGKILL to the marked processes; returns their ids. SandboxError when one stays."""
    killed: list[int] = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes = list(marked_processes(path))
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        killed += [process.pid for process in processes]
        psutil.wait_procs(processes, timeout=2.0)
    left = [p.pid for p in marked_processes(path) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise SandboxError(f"the processes {left} of {path} do not end, not even by SIGKILL")
    return sorted(set(killed))


def sweep(runtime_dir: Path) -> list[Path]:
    """Remove the holdings of dead processes: those in this runtime directory and in those of this user's other runs
    beside it. Returns what was removed; what cannot be removed is told to the log, and in nobody's way."""
    removed = []
    candidates = [*runtime_dir.glob("sb-*"), *runtime_dir.parent.glob(f"prorl-{os.getuid()}-*/sb-*")]
    for path in dict.fromkeys(candidates):
        try:
            if _is_ours(path.parent) and _is_ours(path) and _sweep_one(path):
                removed.append(path)
        except SandboxError as error:
            log.error("what a dead process left in %s is not swept: %s", path, error)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _sweep_one(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # being made, or being removed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its holder lives
    else:
        kill_marked(path)
        remove_tree(path)
        return True
    finally:
        os.close(lock)
