"""What our processes inherit: the site's setup lines, the node's GPUs split among them, and nothing of Slurm's
that would make MPI or a nested srun think that it is part of the step."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prorl_hpc.config.run_directory import ATTEMPT, RANK, RUN_ID, RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.plan import NodePlan

_FOREIGN = re.compile(r"^(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|MPI_LOCAL|SUBMITIT)")
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURMD_NODENAME")


def child_environment(environ: Mapping[str, str], run: RunDirectory, rank: int) -> dict[str, str]:
    """The environment of our processes on node ``rank`` of the plan, from the supervisor's."""
    kept = {k: v for k, v in environ.items() if k in _KEPT or not _FOREIGN.match(k)}
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


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs given to this node's task: CUDA_VISIBLE_DEVICES where it is set, else all of the machine."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    numbers = [m.group(1) for path in devices.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))]
    return sorted(numbers, key=int)


def split_gpus(node: NodePlan, config: ProrlConfig, gpus: list[str]) -> dict[str, list[str]]:
    """GPUs of each role on this node; within a role, the servers or ranks share them out by their local index
    (a server takes engine.tensor_parallel, a rank one). On one machine the two roles may overlap; a role that
    gets too few is an error."""
    counts = {role: sum(p.role == role for p in node.processes) for role in ("inference", "trainer")}
    servers, ranks = counts["inference"] * config.engine.tensor_parallel, counts["trainer"]
    if not gpus:
        return {}
    for role, wanted in (("inference", servers), ("trainer", ranks)):
        if wanted > len(gpus):
            raise RunError(
                f"the {counts[role]} {role} processes of this node need {wanted} GPUs, it has {len(gpus)} "
                f"({', '.join(gpus)}): raise cluster.{role}.gpus or lower engine.servers_per_node, "
                "engine.tensor_parallel or trainer.ranks_per_node"
            )
    alone = not servers or not ranks
    return {
        "inference": gpus if alone else gpus[:servers],
        "trainer": gpus if alone else gpus[len(gpus) - ranks :],
    }
