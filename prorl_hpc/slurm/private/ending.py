"""Ends processes of a private cluster, and finds those that no pid file names."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "munged")


def end(pids: list[int], number: int, timeout_s: float = 10.0) -> None:
    """Signal ``pids`` and wait until they are gone (a zombie counts as gone), then SIGKILL what is left."""
    for sent in (number, signal.SIGKILL):
        for pid in filter(_alive, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        deadline = time.monotonic() + timeout_s
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)


def processes_of(conf: Path) -> list[int]:
    """The daemons that were started with this slurm.conf, and what their slurmd started for jobs. Not everything with
    SLURM_CONF in its environment: that is also how people's shells and tests speak to the cluster."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            variables = (entry / "environ").read_bytes().split(b"\0")
            if b"SLURM_CONF=" + os.fsencode(conf) not in variables or not _alive(int(entry.name)):
                continue
            name = (entry / "comm").read_text().strip()
            if name in DAEMONS or any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables):
                found.append(int(entry.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
