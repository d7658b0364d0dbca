"""What our processes inherit: the site's setup lines, and nothing of Slurm's that would make MPI or a nested srun think
that it is part of the step."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prorl_hpc.config.run_directory import ATTEMPT, RANK, RUN_ID, RunDirectory
from prorl_hpc.messages.errors import RunError

_FOREIGN = re.compile(r"^(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|MPI_LOCAL|SUBMITIT)")
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURMD_NODENAME")


def child_environment(
    environ: Mapping[str, str], run: RunDirectory, rank: int, runtime_root: str = ""
) -> dict[str, str]:
    """The environment of our processes on node ``rank`` of the plan, from the supervisor's. Variables that
    ``runtime_root`` (run.runtime_root) names stay."""
    named = re.findall(r"\$\{?(\w+)", runtime_root)  # such as SLURM_TMPDIR
    kept = {k: v for k, v in environ.items() if k in (*_KEPT, *named) or not _FOREIGN.match(k)}
    return {**kept, RUN_ID: run.run_id, ATTEMPT: str(run.attempt), RANK: str(rank), "PYTHONUNBUFFERED": "1"}


def submission_unset(environ: Mapping[str, str]) -> list[str]:
    """Variables of an enclosing job that sbatch must not see (it would inherit SLURM_MEM_… and be refused)."""
    return sorted(k for k in environ if re.match(r"^(SLURM|SRUN|PMI|PMIX)", k) and k != "SLURM_CONF")


def after_setup(lines: list[str], environ: dict[str, str], log: Path) -> dict[str, str]:
    """The environment that ``cluster.setup`` leaves behind; its output goes to ``log``. Raises RunError."""
    if not lines:
        return environ
    with tempfile.TemporaryFile() as answer, log.open("ab") as out:
        script = "\n".join(["set -e", *lines, f"env -0 >&{answer.fileno()}"])
        code = subprocess.call(
            ["bash", "-c", script],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[answer.fileno()],
        )
        answer.seek(0)
        left = answer.read()
    if code != 0:
        raise RunError(f"a line of cluster.setup failed with code {code}: see {log}")
    pairs = (item.split(b"=", 1) for item in left.split(b"\0") if b"=" in item)
    return {os.fsdecode(key): os.fsdecode(value) for key, value in pairs}
