"""Which limits of a sandbox hold on this node, and by what."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox.cgroups import Cgroups, GroupLimits

WATCH = "a watch in each sandbox"


@dataclass(frozen=True)
class Held:
    """One limit. ``by``: the mechanism; empty: nothing holds it here."""

    limit: str
    by: str


def group_limits(config: SandboxConfig) -> GroupLimits:
    """What is asked of a control group."""
    return GroupLimits(config.max_memory_mib, config.max_processes, config.max_cpus)


def server_limits(config: SandboxConfig) -> dict[str, int]:
    """What the tool server is to hold by itself, by rlimits and its watch; 0: no limit.

    Also what control groups hold: they end a fork bomb as little as files that fill the memory."""
    return {
        "max_processes": config.max_processes,
        "max_memory_mib": config.max_memory_mib,
        "max_disk_mib": config.max_disk_mib,
        "max_file_mib": config.max_file_mib,
    }


def held_here(groups: Cgroups) -> list[Held]:
    """All limits, as `prorl-hpc doctor` states them."""
    processes = groups.holding("pids") or ("RLIMIT_NPROC" if _rlimit_counts_sandboxes() else "")
    return [
        Held("memory", groups.holding("memory") or WATCH),
        Held("processes", f"{processes} and {WATCH}" if processes else WATCH),
        Held("cpu", groups.holding("cpu")),
        Held("disk", f"{WATCH}, RLIMIT_FSIZE for each file"),
    ]


def _rlimit_counts_sandboxes() -> bool:
    """RLIMIT_NPROC counts each user namespace by itself since Linux 5.14, and never holds for root."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return release >= (5, 14) and os.getuid() != 0
