"""What the sandbox uses: its processes, their memory and the files in memory, its disk. For ``stats`` and the watch.

Inside a container all of /proc is the sandbox's; elsewhere (``local``) it is what descends from this process.
"""

from __future__ import annotations

import json
import os
import time

from prorl_hpc.sandbox.tools.processes import descendants
from prorl_hpc.sandbox.tools.toolset import Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any, ClassVar

    from prorl_hpc.sandbox.tools.toolset import Call, Host

OVERLAY = "/.prorl/over"
"""Where a container that may write over its image finds what it wrote."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SLICE_S = 0.002
"""How long a walk through the directories holds up everything else."""


class Process:
    """One process, as /proc/PID/stat has it."""

    def __init__(self, pid: int, stat: bytes) -> None:
        self.pid = pid
        head, _, tail = stat.rpartition(b")")
        self.name = head.partition(b"(")[2].decode("utf-8", "replace")
        fields = tail.split()
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.terminal = int(fields[4])
        self.cpu_s = sum(map(int, fields[11:15])) * _TICK_S
        """Its own, and that of its children that ended."""
        self.threads = int(fields[17])
        self.resident = int(fields[21]) * _PAGE


def contained(host: Host) -> bool:
    return bool(host.kit)


def processes(host: Host) -> list[Process]:
    """All of the sandbox but the tool server; zombies too, for they are counted by the kernel's limits."""
    own = os.getpid()
    if contained(host) and own == 1:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        pids = [pid for pid, _ in descendants(own, set())]
    return list(_read(pid for pid in pids if pid != own))


def _read(pids: Iterator[int]) -> Iterator[Process]:
    for pid in pids:
        try:
            fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        try:
            yield Process(pid, os.read(fd, 1024))
        except ProcessLookupError:
            continue
        finally:
            os.close(fd)


def private_bytes(process: Process) -> int:
    """Memory of its own: resident anonymous pages. Pages shared with a parent since a fork count in both."""
    try:
        with open(f"/proc/{process.pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * _PAGE


def fair_bytes(process: Process) -> int:
    """The same, with each shared page parted among those that share it; dear, where the process is large."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss_Anon:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # it ended, or is not to be looked at, or the kernel is older than 5.4
    return private_bytes(process)


def memory_mounts() -> list[str]:
    """A mount point of each file system in memory that this sandbox can write to."""
    found: dict[int, str] = {}
    with open("/proc/self/mounts") as file:
        for line in file:
            _, path, kind, options, *_ = line.split()
            if kind in ("tmpfs", "ramfs") and "rw" in options.split(","):
                try:
                    found.setdefault(os.stat(path).st_dev, path)
                except OSError:
                    continue  # not ours to look at, so not ours to write to
    return list(found.values())


def files_in_memory_bytes(mounts: list[str]) -> int:
    """Of file systems in memory and System V shared memory. For containers: elsewhere they are everybody's."""
    total = 0
    for path in mounts:
        info = os.statvfs(path)
        total += (info.f_blocks - info.f_bfree) * info.f_frsize
    with open("/proc/sysvipc/shm") as file:
        names = file.readline().split()
        for line in file:
            total += int(line.split()[names.index("rss")])
    return total


def unnamed_bytes(seen: list[Process], mounts: list[str]) -> tuple[int, int]:
    """(memory, disk) of files that are open but have no name any more, memfds among them."""
    sizes: dict[tuple[int, int], int] = {}
    counted = {os.stat(path).st_dev for path in mounts}
    disks = {os.stat(path).st_dev for path in ("/", "/tmp", ".")}
    for process in seen:
        directory = f"/proc/{process.pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # it ended, or is not to be looked at
        for name in names:
            try:
                info = os.stat(f"{directory}/{name}")
            except OSError:
                continue
            if info.st_nlink == 0 and info.st_mode & 0o170000 == 0o100000 and info.st_dev not in counted:
                sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    disk = sum(size for (device, _), size in sizes.items() if device in disks)
    return sum(sizes.values()) - disk, disk


def disk_places(host: Host) -> list[str]:
    """The directories whose content counts as the sandbox's disk."""
    temporary = "/tmp" if contained(host) else host.settings.env.get("TMPDIR", "")
    places = [host.settings.root, temporary, host.settings.scratch, OVERLAY if contained(host) else ""]
    return [place for place in places if place and os.path.isdir(place)]


def walk_disk(places: list[str]) -> Generator[float, None, int]:
    """Bytes on disk below ``places``, hard links counted once. Work for the loop."""
    total, linked, pending = 0, set(), list(places)
    pause = time.monotonic() + _SLICE_S
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # it was removed while we looked
                    if info.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                        if (info.st_dev, info.st_ino) in linked:
                            continue
                        linked.add((info.st_dev, info.st_ino))
                    total += info.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            pass  # removed, or closed to us
        if time.monotonic() > pause:
            yield 0.0
            pause = time.monotonic() + _SLICE_S
    return total


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {"stats": {}}

    def __init__(self, host: Host) -> None:
        self._host = host

    def stats(self, call: Call) -> Generator[float, None, Answer]:
        """JSON of SandboxStats."""
        disk = yield from walk_disk(disk_places(self._host))
        seen = processes(self._host)
        mounts = memory_mounts() if contained(self._host) else []
        unnamed_memory, unnamed_disk = unnamed_bytes(seen, mounts)
        memory = sum(map(fair_bytes, seen)) + unnamed_memory
        if contained(self._host):
            memory += files_in_memory_bytes(mounts)
        found = {
            "processes": sum(process.state != "Z" for process in seen),
            "memory_bytes": memory,
            "disk_bytes": disk + unnamed_disk,
            "cpu_s": round(sum(os.times()[:4]) + sum(process.cpu_s for process in seen), 3),
        }
        return Answer(json.dumps(found).encode())
