"""Which process is meant, told so that it can be looked for later: alive, dead, or not to be known from here.

A process id alone says little: it is given again, and means another process in another PID namespace (a container), on
another host, and after a reboot. Start times by the clock move with it, so that ticks since boot are compared.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_MACHINE_ID = Path("/etc/machine-id")
_OUTSIDE_CONTAINERS = 0xEFFFFFFC
"""The inode of a kernel's first PID namespace (PROC_PID_INIT_INO)."""


class Life(enum.StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class ProcessIdentity(msgspec.Struct, frozen=True):
    """``started``: in clock ticks since boot. ``boot``, ``machine``: the kernel's id of this boot, and machine-id(5).
    ``pidns``: inode of the PID namespace in which ``pid`` counts. What could not be read is 0 or empty."""

    pid: int
    started: int = 0
    host: str = ""
    boot: str = ""
    machine: str = ""
    pidns: int = 0

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """A process of this PID namespace that lives."""
        started = (start_ticks(pid) or 0) if _proc_is_ours() else 0
        boot, machine = _read(_PROC / "sys" / "kernel" / "random" / "boot_id"), _read(_MACHINE_ID)
        return cls(pid, started, socket.gethostname(), boot, machine, _namespace())

    @classmethod
    def from_words(cls, words: Mapping[str, str]) -> ProcessIdentity | None:
        """What ``words`` told; None if they name no process."""
        try:
            return msgspec.convert(
                {name: words[name] for name in cls.__struct_fields__ if name in words}, cls, strict=False
            )
        except msgspec.ValidationError:
            return None

    def words(self) -> dict[str, str]:
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    def life(self) -> Life:
        here = ProcessIdentity.of(os.getpid())
        if not (self.started and self.boot and self.pidns):
            return Life.UNKNOWN
        if self.boot != here.boot:
            return Life.DEAD if self._before_reboot(here) else Life.UNKNOWN
        if self.pidns != here.pidns or not _proc_is_ours():
            return Life.UNKNOWN
        return Life.ALIVE if start_ticks(self.pid) == self.started else Life.DEAD

    def why_unknown(self) -> str:
        """For people, where ``life`` is UNKNOWN."""
        here = ProcessIdentity.of(os.getpid())
        if not (self.started and self.boot and self.pidns):
            return f"process {self.pid} is named without its start, boot and PID namespace, which tell it from others"
        if self.boot != here.boot:
            other = (
                "an earlier boot or another machine of that name" if self.host == here.host else f"this is {here.host}"
            )
            return f"process {self.pid} was started on {self.host} ({other}): only there it can be looked for"
        return f"process {self.pid} was started on {self.host} in another PID namespace, as in a container: look there"

    def _before_reboot(self, here: ProcessIdentity) -> bool:
        """It was this very machine's. Containers share names and machine ids with others, so of them it is not said."""
        outside = self.pidns == here.pidns == _OUTSIDE_CONTAINERS
        return outside and self.machine != "" and (self.host, self.machine) == (here.host, here.machine)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _proc_is_ours() -> bool:
    """/proc shows this PID namespace; it need not after unshare(1) without a mount of its own."""
    try:
        return (_PROC / "self").readlink().name == str(os.getpid())
    except OSError:
        return False


def _namespace() -> int:
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
