"""Removes what a run leaves on a node, and only what bears its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory

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
    left = []
    for path in node_files(run, runtime_root):
        if stuck := _unmount_below(path):
            left += [f"mount {mount}" for mount in stuck]
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if path.exists():
            left.append(str(path))
    return left


def node_files(run: RunDirectory, runtime_root: str) -> list[Path]:
    """What there is of the run on this node."""
    runtime = run.runtime_dir(runtime_root)
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
