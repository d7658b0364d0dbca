"""The sbatch script of a run: one component a plain job, several one heterogeneous job with one joint step.

Pure text: rendering it needs no Slurm, so ``launch --dry-run`` shows it anywhere and golden files hold it.
Every component runs one task per node, our supervisor; ``srun`` gives the tasks ranks that are global over
the components, in their order.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.schema import ClusterConfig, ComponentConfig
from prorl_hpc.slurm.plan import Plan

OWNED_OPTIONS = {
    "job-name": "run.name",
    "output": "the run directory's jobs/",
    "error": "the run directory's jobs/",
    "open-mode": "the run directory's jobs/",
    "nodes": "cluster.<component>.nodes",
    "ntasks": "one task per node",
    "ntasks-per-node": "one task per node",
    "array": "one job per run",
    "wrap": "one job per run",
    "requeue": "`prorl-hpc resume`",
    "no-requeue": "`prorl-hpc resume`",
}
"""sbatch options that the plan decides, and what to set instead."""

_SBATCH_NAMES = """account acctg-freq batch bb bbf begin chdir clusters cluster-constraint comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution exclude exclusive export export-file extra extra-node-info get-user-env
gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint ignore-pbs
input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nice no-kill nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket
oom-kill-step overcommit oversubscribe partition power prefer priority profile propagate qos reboot
reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes wait wait-all-nodes
wckey"""
SBATCH_OPTIONS = frozenset(_SBATCH_NAMES.split())
"""Long names that sbatch knows (Slurm 22.05 to 25.05), without those in OWNED_OPTIONS."""


@dataclass(frozen=True)
class Component:
    """One component's sbatch options by long name; an empty value is a flag."""

    name: str
    nodes: int
    options: dict[str, str]


def check_extra(where: str, extra: dict[str, str], site_options: Iterable[str] = ()) -> list[str]:
    """What is wrong with ``cluster.extra`` or a component's; ``site_options`` are those that only this
    site's sbatch knows (SPANK plugins)."""
    known = SBATCH_OPTIONS | set(site_options)
    errors = []
    for key in extra:
        if key in OWNED_OPTIONS:
            errors.append(f"{where}.{key}: sbatch's --{key} is decided by the plan: use {OWNED_OPTIONS[key]}")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"valid names: {', '.join(sorted(known))}"
            errors.append(f"{where}.{key}: sbatch has no option --{key}; {hint}")
    return errors


def components(cluster: ClusterConfig, plan: Plan) -> list[Component]:
    """The components of ``plan`` with every setting of ``cluster`` as an sbatch option. Components of a
    heterogeneous job inherit nothing from one another, so common options are repeated."""
    by_name = {"rollout": cluster.rollout, "inference": cluster.inference, "trainer": cluster.trainer}
    return [
        Component(planned.name, len(planned.nodes), _options(cluster, by_name[planned.name], len(planned.nodes)))
        for planned in plan.components
    ]


def _options(cluster: ClusterConfig, component: ComponentConfig, nodes: int) -> dict[str, str]:
    options = {"nodes": str(nodes), "ntasks-per-node": "1", "time": str(cluster.time_minutes)}
    named = {
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "partition": component.partition,
        "constraint": component.constraint,
        "cpus-per-task": component.cpus,
        "mem": f"{round(component.memory_gib * 1024)}M" if component.memory_gib else "",
        "gpus-per-node": component.gpus,
    }
    options.update({key: str(value) for key, value in named.items() if value})
    if component.exclusive:
        options["exclusive"] = ""
    options.update({key: str(value) for key, value in {**cluster.extra, **component.extra}.items()})
    return options


def render(job_name: str, folder: Path, parts: list[Component], srun_args: list[str], command: str) -> str:
    """The script; ``command`` is the shell words that every task runs, ``folder`` gets submitit's files."""
    job_wide = {
        "job-name": job_name,
        "output": f"{folder}/%j_0_log.out",
        "error": f"{folder}/%j_0_log.err",
        "open-mode": "append",
        # A requeued job would meet the marks of its first attempt; `resume` makes a fresh start from the checkpoint.
        "no-requeue": "",
    }
    shape = ", ".join(f"{part.name} ({part.nodes} node{'s' * (part.nodes > 1)})" for part in parts)
    lines = ["#!/bin/bash", f"# {job_name}: {shape}", *map(_sbatch_line, job_wide.items())]
    for i, part in enumerate(parts):
        lines += ["#SBATCH hetjob"] if i else []
        lines += ["", f"# {part.name}", *map(_sbatch_line, part.options.items())]
    lines += ["", "export SUBMITIT_EXECUTOR=slurm", "exec " + _step(folder, parts, srun_args, command), ""]
    return "\n".join(lines)


def _step(folder: Path, parts: list[Component], srun_args: list[str], command: str) -> str:
    """One joint step. Since Slurm 22.05 srun does not inherit --cpus-per-task, and a supervisor with several
    processes must not be bound to one core."""
    steps = []
    for i, part in enumerate(parts):
        words = [f"--het-group={i}"] if len(parts) > 1 else []
        words += ["--unbuffered", "--kill-on-bad-exit=1", "--mpi=none", "--cpu-bind=none"]
        if cpus := part.options.get("cpus-per-task"):
            words.append(f"--cpus-per-task={cpus}")
        words += [f"--output={folder}/%j_%t_log.out", f"--error={folder}/%j_%t_log.err", *srun_args]
        steps.append(f"{shlex.join(words)} \\\n    {command}")
    return "srun " + " \\\n  : ".join(steps)


def _sbatch_line(option: tuple[str, str]) -> str:
    key, value = option
    return f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")
