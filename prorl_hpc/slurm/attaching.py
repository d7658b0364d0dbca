"""A shell on a node of a run that runs: where it is, the command that leads there, and what it begins with.

``python -m prorl_hpc.slurm.attaching RUN_DIR ATTEMPT RANK [COMMAND]`` is the node's end of it: it becomes the shell.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import ATTEMPT, RANK, RUN_ID, RunDirectory, RunDirectoryError
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.environment import submission_unset
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.steps import PlacedNode

RUN_DIR, RUNTIME_DIR = "PRORL_RUN_DIR", "PRORL_RUNTIME_DIR"
"""Environment variables of the shell: the run's directory, and this node's own."""


def chosen_node(run: RunDirectory, target: str | None) -> PlacedNode:
    """The node that ``target`` means in the newest attempt: a host, a process, a component, a number in the plan; None:
    the first. Raises RunError while nothing is placed, ConfigError for what means no node."""
    placed, plan = placed_nodes(run), read_json(run.plan_file, Plan)
    if target is None:
        return placed[0]
    nodes = plan.nodes if plan is not None else []
    names = {process.name: rank for rank, node in enumerate(nodes) for process in node.processes}
    ranks = [node.rank for node in placed if target in (node.host, node.component, str(node.rank), f"node-{node.rank}")]
    ranks += [names[target]] if target in names else []
    for node in placed:
        if node.rank in ranks:
            return node
    known = list(dict.fromkeys([*(node.host for node in placed), *names]))
    near = difflib.get_close_matches(target, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{target} is no node or process of {run.run_id}; {hint}there are: {', '.join(known)}")


def placed_nodes(run: RunDirectory) -> list[PlacedNode]:
    """Of the attempt; at least one. Raises RunError while nothing is placed."""
    placed = read_json(run.placement_file, list[PlacedNode])
    if not placed:
        raise RunError(f"attempt {run.attempt} of {run.run_id} has no nodes yet: `prorl-hpc status {run.path}`")
    return placed


def attach_words(run: RunDirectory, node: PlacedNode, command: str | None) -> list[str]:
    """The command line that leads to a shell on ``node``, or that runs ``command`` there. A node of a Slurm job is
    entered by a step beside those of the run. A heterogeneous job is always named by its leader's id: srun refuses the
    ids of its components, and the leader's without a group."""
    inside = [sys.executable, "-m", "prorl_hpc.slurm.attaching", str(run.path), str(run.attempt), str(node.rank)]
    inside += [] if command is None else [command]
    placed = placed_nodes(run)
    if not placed[0].job_id:
        job = Job.open(run)
        if job is None or not job.is_inside_another_job():
            return inside
        # the run's only node, which is the first of that job's
        words = ["srun", f"--jobid={job.record.enclosing}", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"]
        return [*words, "--job-name=prorl-attach", *(["--pty"] if command is None else []), *inside]
    words = ["srun", f"--jobid={placed[0].job_id}"]
    words += [f"--het-group={node.group}"] if any(other.group for other in placed) else []
    words += [
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node.host}",
        "--mpi=none",
        "--job-name=prorl-attach",
    ]
    return [*words, *(["--pty"] if command is None else []), *inside]


def outer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For the command of ``attach_words``: without what says that this is a job itself."""
    unset = submission_unset(environ)
    return {key: value for key, value in environ.items() if key not in unset}


def main(argv: list[str]) -> int:
    """Becomes the shell; returns only if there is none."""
    run_dir, attempt, rank, *command = argv
    os.environ |= {RUN_ID: Path(run_dir).name, ATTEMPT: attempt, RANK: rank, RUN_DIR: run_dir}
    runtime = _runtime_dir(RunDirectory(run_dir), int(rank))
    if runtime is not None:
        os.environ[RUNTIME_DIR] = str(runtime)
        os.chdir(runtime)
    shell = os.environ.get("SHELL") or "/bin/sh"
    words = [shell, "-c", command[0]] if command else [shell, "-i"]
    try:
        os.execvp(shell, words)
    except OSError as error:
        print(f"{shell} (SHELL) cannot be started on this node: {error.strerror}", file=sys.stderr)
    return 127


def _runtime_dir(run: RunDirectory, rank: int) -> Path | None:
    """This node's, if it is there."""
    try:
        root = run.load_config().run.runtime_root
        path = run.runtime_dir(root, rank=rank)
    except (RunDirectoryError, OSError, msgspec.MsgspecError):
        return None
    return path if path.is_dir() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
