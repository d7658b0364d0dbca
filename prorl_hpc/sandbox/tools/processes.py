"""The processes of a sandbox, as its tool server sees them."""

from __future__ import annotations

import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # see reaper.py

_OOM_SCORE = 500


def children(pid: int) -> list[int]:
    """Children of all threads of ``pid``; none when it is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked
    return found


def _read(path: str) -> bytes:
    """A whole file of /proc, in a third of the time that ``open`` takes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, 8192):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def start_ticks(pid: int) -> int:
    """When ``pid`` started, which tells it from a later process of the same number; 0 when it is gone."""
    try:
        return int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants(pid: int, spared: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """(pid, start) of everything below ``pid``, without the ``spared`` and what these have started."""
    found: set[tuple[int, int]] = set()
    pending = children(pid)
    while pending:
        child = pending.pop()
        known = (child, start_ticks(child))
        if known not in spared and known not in found:
            found.add(known)
            pending += children(child)
    return found


def send(processes: set[tuple[int, int]], number: int) -> None:
    """A signal to each that is there and in reach."""
    for pid, _ in processes:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # gone already, or of another user and out of reach


def kill(processes: set[tuple[int, int]]) -> None:
    send(processes, signal.SIGKILL)


def adopt_orphans() -> None:
    """Orphans of our descendants come to this process from now on, whatever it executes, and none can hide."""
    import ctypes  # not at the import of this module: it takes its time

    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def become_subreaper() -> None:
    """Like ``adopt_orphans``; PID 1 gets them anyway."""
    if os.getpid() != 1:
        adopt_orphans()


def be_the_first_to_go() -> None:
    """When memory runs out on the node or in the job, the kernel ends this and what it starts, before the worker."""
    with open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < _OOM_SCORE:
            file.write(str(_OOM_SCORE))


def set_limits(limits: dict[str, int]) -> None:
    """rlimits of everything that this process starts; 0 or absent: no limit."""
    _limit(resource.RLIMIT_CORE, 0)
    if limits.get("max_file_mib"):
        _limit(resource.RLIMIT_FSIZE, limits["max_file_mib"] << 20)
    if limits.get("max_processes") and processes_are_counted_here():
        _limit(resource.RLIMIT_NPROC, limits["max_processes"])


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def processes_are_counted_here() -> bool:
    """Whether RLIMIT_NPROC counts this sandbox alone: in a user namespace, since Linux 5.14. Elsewhere it counts
    all that the user runs on the node, and would fail the sandbox for what others do."""
    release = tuple(int(part) for part in os.uname().release.partition("-")[0].split(".")[:2])
    with open("/proc/self/uid_map") as file:
        return release >= (5, 14) and file.read().split() != ["0", "0", "4294967295"]


def end_everything() -> None:
    """Kill all descendants; new ones may appear while we look, so look until there are none."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        left = descendants(os.getpid(), set())
        if not left:
            return
        kill(left)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.002)
    sys.exit(f"tool server: processes are left that do not die: {sorted(left)}")
