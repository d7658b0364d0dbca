"""What dead runs of this user left on this machine: runtime directories and shared memory. Only what is surely dead.

A runtime directory says whose it is (its ``owner`` file): it is dead when neither that job nor that process lives, which
can be known only where that process's number counts (slurm.process_identity). One without such a file, and shared memory
whose runtime directory is gone, are dead when nobody listens on their sockets and no process has anything in them open
(slurm.in_use).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prorl_hpc.config.run_directory import OWNER_FILE
from prorl_hpc.slurm.cleanup import SHARED_MEMORY, remove_path
from prorl_hpc.slurm.in_use import InUse
from prorl_hpc.slurm.process_identity import Life, ProcessIdentity
from prorl_hpc.slurm.states import JobPhase, JobReports, job_reports

YOUNG_S = 60.0
"""A directory without an owner may just be coming to be."""


@dataclass(frozen=True)
class Leftover:
    """Something on this machine that is named after a run. ``why``: for people, why it is dead, or why it is kept."""

    path: Path
    run_id: str
    dead: bool
    why: str
    owner: dict[str, str] = field(default_factory=dict)


def find_leftovers(roots: Iterable[Path], living: Iterable[str] = ()) -> list[Leftover]:
    """All that bears the name of a run of this user, in ``roots`` (of runtime directories) and in shared memory.
    ``living``: ids of runs that are known to live. Asks Slurm at most once."""
    directories = [
        path for root in dict.fromkeys(roots) for path in _ours(root, f"prorl-{os.getuid()}-*", stat.S_ISDIR)
    ]
    owners = {path: read_owner(path) for path in directories}
    jobs = {owner["job"] for owner in owners.values() if owner.get("job")}
    asked, alive, used = job_reports(jobs), set(living), InUse.now()
    found = list(_still_there(directories, lambda path: _of_directory(path, owners[path], asked, alive, used)))
    kept = {item.path.name for item in found if not item.dead}
    kept |= {f"prorl-{item.run_id}" for item in found if not item.dead and item.run_id} | {f"prorl-{i}" for i in alive}
    memory = _ours(SHARED_MEMORY, "prorl-*", lambda mode: not stat.S_ISLNK(mode))
    return [*found, *_still_there(memory, lambda path: _of_memory(path, kept, used))]


def remove(leftover: Leftover) -> list[str]:
    """Remove it with the mounts in it; returns what is left, for people. One that has another owner by now, a run that
    has begun meanwhile, stays."""
    return remove_path(leftover.path) if read_owner(leftover.path) == leftover.owner else []


def read_owner(directory: Path) -> dict[str, str]:
    """run, path, job, cluster and process of a runtime directory; empty if it does not say."""
    try:
        lines = (directory / OWNER_FILE).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {key: value for key, _, value in (line.partition("=") for line in lines) if value}


def _still_there(paths: Iterable[Path], look: Callable[[Path], Leftover]) -> Iterator[Leftover]:
    """``look`` at each; what its own run removes meanwhile is left out."""
    for path in paths:
        try:
            yield look(path)
        except FileNotFoundError:
            continue


def _of_directory(path: Path, owner: dict[str, str], asked: JobReports, alive: set[str], used: InUse) -> Leftover:
    run_id = owner.get("run", "")
    if not owner:
        dead, why = _unowned(path, used)
    elif run_id in alive:
        dead, why = False, f"{run_id} lives"
    else:
        dead, why = _owned(owner, asked)
    return Leftover(path, run_id, dead, why, owner)


def _owned(owner: dict[str, str], asked: JobReports) -> tuple[bool, str]:
    if job := owner.get("job"):
        cluster = owner.get("cluster", "")
        report = asked.of(job, f"prorl-{run_id}" if (run_id := owner.get("run")) else "", cluster)
        if report is None:
            return False, f"it is not known whether job {job} lives: {asked.why_unknown(cluster)}"
        if report.phase is not JobPhase.ENDED:
            return False, f"job {job} is {report.state}"
    process = ProcessIdentity.from_words(owner)
    if process is None:
        return False, "it names no process"
    life = process.life()
    if life is Life.DEAD:
        return True, f"job {job} and process {process.pid} are gone" if job else f"process {process.pid} is gone"
    return False, f"its process {process.pid} lives" if life is Life.ALIVE else process.why_unknown()


def _unowned(path: Path, used: InUse) -> tuple[bool, str]:
    if time.time() - path.stat().st_mtime < YOUNG_S:
        return False, f"it has no {OWNER_FILE} file, and is younger than {YOUNG_S:.0f} s"
    if user := used.user_of(path):
        return False, user
    return True, "nobody owns it, listens in it or has it open"


def _of_memory(path: Path, kept: set[str], used: InUse) -> Leftover:
    if owner := next((name for name in kept if path.name == name or path.name.startswith(f"{name}-")), ""):
        return Leftover(path, "", False, f"it belongs to {owner}")
    if user := used.user_of(path):
        return Leftover(path, "", False, user)
    if time.time() - path.stat().st_mtime < YOUNG_S:
        return Leftover(path, "", False, f"it is younger than {YOUNG_S:.0f} s")
    return Leftover(path, "", True, "no process has it open")


def _ours(root: Path, pattern: str, kind: Callable[[int], bool]) -> list[Path]:
    """Entries of this user; nothing where there is no such directory."""
    found = []
    for path in sorted(root.glob(pattern)) if root.is_dir() else []:
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue
        if info.st_uid == os.getuid() and kind(info.st_mode):
            found.append(path)
    return found
