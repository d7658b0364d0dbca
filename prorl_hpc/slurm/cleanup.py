"""Removes what a run leaves on a node, and only what bears its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError

SHARED_MEMORY = Path("/dev/shm")


def empty(runtime_dir: Path) -> None:
    """Remove what an earlier attempt left: sockets of dead processes refuse connections but look alive."""
    for path in runtime_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_node_files(run: RunDirectory, runtime_root: str) -> list[str]:
    """Remove this node's runtime directory and the run's shared memory; returns what is left, for people."""
    return [line for path in node_files(run, runtime_root) for line in remove_path(path)]


def remove_path(path: Path) -> list[str]:
    """Remove a file, or a directory with the mounts in it; returns what is left, for people."""
    if stuck := _unmount_below(path):
        return [f"mount {mount}" for mount in stuck]
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return [str(path)] if path.exists() else []


def node_files(run: RunDirectory, runtime_root: str) -> list[Path]:
    """What there is of the run on this node; nothing where ``runtime_root`` names a variable that it has not."""
    try:
        runtime = run.runtime_dir(runtime_root)
    except RunDirectoryError:
        return []
    found = {path for stem in (runtime.name, f"prorl-{run.run_id}") for path in SHARED_MEMORY.glob(f"{stem}*")}
    return [path for path in (runtime, *sorted(found)) if path.exists()]


def _unmount_below(path: Path) -> list[str]:
    """Detach mounts under ``path``, deepest first; returns those that stay."""
    for mount in reversed(_mounts_below(path)):
        for command in (["fusermount", "-uz", mount], ["umount", "-l", mount]):
            if shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0:
                break
    return _mounts_below(path)


def _mounts_below(path: Path) -> list[str]:
    mounts = [line.split()[4].replace("\\040", " ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted(m for m in mounts if Path(m).is_relative_to(path))
