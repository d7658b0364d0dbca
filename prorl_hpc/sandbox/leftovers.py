"""Processes and directories that a sandbox could leave behind: how they are found, proven gone, and swept.

A process belongs to a sandbox when

* its environment names the Box (the container's launcher at its beginning; all processes of ``local``), or
* it is in the session that the sandbox's process opened, as written in the Box. So is what the launcher becomes, which
  takes an environment of its own and, killed over its start, may wait for ever; and so are the FUSE servers of a .sif
  image, which have an empty environment and outlive a launcher that was killed.

What is inside a container needs no search: the kernel ends it with the container's first process, the tool server.
Only what belongs to this user and is found so is ever ended, and only what bears our names, belongs to this user and
is not locked is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.cgroups import remove_recorded
from prorl_hpc.sandbox.directories import LOCK, MARKER, NEW_LOCK, Box, remove_locked

log = logging.getLogger(__name__)

HELPERS = frozenset({"squashfuse", "squashfuse_ll", "fuse-overlayfs", "fuse2fs", "gocryptfs"})
"""What a container's launcher starts beside the container."""
_OF_LAUNCHERS = HELPERS | {"starter", "starter-suid", "apptainer", "singularity"}
"""A swept session is searched for these alone where its first process is gone: its number may have come to another
meanwhile."""
_KILL_S = 4.0
_MAKING_S = 60.0
"""Longer than a holding is without its lock while somebody makes or removes it."""


def record_session(box: Box, pid: int) -> None:
    """``pid`` has just opened the sandbox's session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        box.session.write_text(f"{pid} {psutil.Process(pid).create_time()}")


def left_of_session(session: int, before: float) -> list[int]:
    """Living processes of this user in a session whose first process was reaped, begun before a time (seconds since the
    epoch). While one of them lives, the kernel gives their session's number to nobody."""
    if psutil.pid_exists(session):
        return []  # it came to another, so none is left, and this is another's session
    return in_session(session, before)


def in_session(session: int, before: float) -> list[int]:
    """Living processes of this user in a session, begun before a time (seconds since the epoch)."""
    return [process.pid for process in _in_session(session) if process.create_time() < before]


def _in_session(session: int) -> Iterator[psutil.Process]:
    for name in os.listdir("/proc"):  # noqa: PTH208  (called at every stop, on nodes with thousands of processes)
        if name.isdigit():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(int(name)) == session:
                    process = psutil.Process(int(name))
                    if process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                        yield process


def marked_processes(path: Path) -> Iterator[psutil.Process]:
    """Processes of this user that belong to the Box ``path``, or to one below it."""
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
    for record in (*path.glob("session"), *path.glob("*/session")):
        yield from _helpers_of(record)


def _helpers_of(record: Path) -> Iterator[psutil.Process]:
    try:
        pid, began = record.read_text().split()
        session, since = int(pid), float(began)
    except (OSError, ValueError):
        return  # removed meanwhile, or cut short by a full disk
    whole = False
    with contextlib.suppress(psutil.NoSuchProcess):
        if abs(psutil.Process(session).create_time() - since) > 1:
            return  # the number is another's now, and so is the session
        whole = True
    for process in _in_session(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (whole or process.name() in _OF_LAUNCHERS) and process.create_time() >= since - 1:
                yield process


def kill_marked(path: Path) -> list[int]:
    """SIGTERM, then SIGKILL to what belongs there, and to what that has started meanwhile; returns their ids.
    SandboxError when one stays."""
    killed: set[int] = set()
    number = signal.SIGTERM
    give_up = time.monotonic() + _KILL_S
    while processes := list(marked_processes(path)):
        if time.monotonic() > give_up:
            left = sorted(process.pid for process in processes)
            raise SandboxError(f"the processes {left} of {path} do not end, not even by SIGKILL")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        killed |= {process.pid for process in processes}
        psutil.wait_procs(processes, timeout=2.0 if number is signal.SIGTERM else 0.5)
        number = signal.SIGKILL
    return sorted(killed)


def mounts_below(path: Path) -> list[str]:
    """Mount points below ``path`` that this process sees. Containers mount in namespaces of their own: none is right."""
    lines = Path("/proc/self/mounts").read_bytes().splitlines()
    # Space, tab, newline and backslash are written as \ooo; all other bytes are as they are.
    points = [re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split(b" ")[1]) for line in lines]
    return [os.fsdecode(point) for point in points if Path(os.fsdecode(point)).is_relative_to(path)]


def sweep(runtime_dir: Path) -> list[Path]:
    """Remove the holdings of dead processes: those in this runtime directory and in those of this user's other runs
    beside it. Returns what was removed; what cannot be removed is told to the log, and in nobody's way."""
    removed = []
    for path in _holdings(runtime_dir):
        try:
            if is_ours(path.parent) and is_ours(path) and _sweep_one(path):
                removed.append(path)
        except (SandboxError, OSError) as error:
            log.error("what a dead process left in %s is not swept: %s", path, error)
    return removed


def _holdings(runtime_dir: Path) -> list[Path]:
    found = []
    for run in dict.fromkeys((runtime_dir, *runtime_dir.parent.glob(f"prorl-{os.getuid()}-*"))):
        with contextlib.suppress(OSError):  # another run's, which has just been removed, or is somebody else's
            found += [run / name for name in os.listdir(run) if name.startswith("sb-")]  # noqa: PTH208
    return found


def is_ours(path: Path) -> bool:
    """A directory, not a link to one, that belongs to this user."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _sweep_one(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _remove_without_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its holder lives
    else:
        for record in path.glob("*/groups"):
            remove_recorded(record)
        kill_marked(path)
        remove_locked(path, LOCK)
        return True
    finally:
        os.close(lock)


def _remove_without_lock(path: Path) -> bool:
    """A holding is being made or removed now, unless it is old: then its process was killed over it. There is nothing
    else in it at those moments."""
    if time.time() - path.stat().st_mtime < _MAKING_S:
        return False
    (path / NEW_LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not one of ours: it stays
        path.rmdir()
    return not path.exists()
