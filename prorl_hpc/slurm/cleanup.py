"""Removes what a run leaves on a node, and only what bears its name.

``python -m prorl_hpc.slurm.cleanup RUN_DIR RANK`` does so for a supervisor of that rank that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from prorl_hpc.config.run_directory import RANK, RUN_ID, RunDirectory, RunDirectoryError

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


def end_processes(run: RunDirectory, rank: str, timeout_s: float = 5.0) -> list[str]:
    """Kill the processes of rank ``rank`` of the run on this node; returns what is left, for people. Only those of the
    user are seen."""
    found = [process for process in psutil.process_iter() if _belongs(process, run.run_id, rank)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _, left = psutil.wait_procs(found, timeout_s)
    return [f"process {process.pid}" for process in left]


def _belongs(process: psutil.Process, run_id: str, rank: str) -> bool:
    try:
        environ = process.environ()
    except psutil.Error:
        return False
    return process.pid != os.getpid() and (environ.get(RUN_ID), environ.get(RANK)) == (run_id, rank)


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


def main(argv: list[str]) -> int:
    """Exit code 1 if something is left, which is printed."""
    path, rank = argv
    run = RunDirectory.open(Path(path))
    os.environ |= {RUN_ID: run.run_id, RANK: rank}
    left = end_processes(run, rank) + remove_node_files(run, run.load_config().run.runtime_root)
    print("\n".join(f"could not be removed: {what}" for what in left), end="")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
