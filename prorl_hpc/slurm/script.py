"""The sbatch script of a run: one component a plain job, several one heterogeneous job.

Pure text: rendering it needs no Slurm, so ``launch --dry-run`` shows it anywhere and golden files hold it.
It runs the launcher on the first node of the first component; the launcher starts a step per node (slurm.steps).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.schema import ClusterConfig, ComponentConfig
from prorl_hpc.slurm.plan import ComponentPlan, Plan


@dataclass(frozen=True)
class Component:
    """One component's sbatch options by long name; an empty value is a flag."""

    name: str
    nodes: int
    options: dict[str, str]


def components(cluster: ClusterConfig, plan: Plan) -> list[Component]:
    """The components of ``plan`` with every setting of ``cluster`` as an sbatch option. Components of a
    heterogeneous job inherit nothing from one another, so common options are repeated."""
    by_name = {"rollout": cluster.rollout, "inference": cluster.inference, "trainer": cluster.trainer}
    return [
        Component(planned.name, len(planned.nodes), _options(cluster, by_name[planned.name], planned))
        for planned in plan.components
    ]


def _options(cluster: ClusterConfig, component: ComponentConfig, planned: ComponentPlan) -> dict[str, str]:
    nodes = len(planned.nodes)
    # Training cannot go on without one of its nodes. Kept without it, its component would end for good while Slurm puts the
    # others back into the queue, where they would wait for it for ever.
    trains = any(process.role == "trainer" for node in planned.nodes for process in node.processes)
    options = {"nodes": str(nodes), "ntasks-per-node": "1", "time": str(cluster.time_minutes)}
    named = {
        "account": component.account or cluster.account,
        "qos": component.qos or cluster.qos,
        "reservation": component.reservation or cluster.reservation,
        "partition": component.partition,
        "constraint": component.constraint,
        "nodelist": component.nodelist,
        "exclude": component.exclude,
        "cpus-per-task": component.cpus,
        "mem": f"{math.ceil(component.memory_gib * 1024)}M" if component.memory_gib else "",
        cluster.gpu_option: _gpus(cluster, component),
    }
    options.update({key: str(value) for key, value in named.items() if value})
    flags = {"exclusive": component.exclusive, "no-kill": cluster.no_kill and nodes > 1 and not trains}
    options.update({key: "" for key, on in flags.items() if on})
    options.update({key: str(value) for key, value in {**cluster.extra, **component.extra}.items()})
    return options


def _gpus(cluster: ClusterConfig, component: ComponentConfig) -> str:
    """``a100:4`` or ``4``; as a generic resource with ``gpu:`` before it."""
    if not component.gpus:
        return ""
    typed = f"{component.gpu_type}:{component.gpus}" if component.gpu_type else str(component.gpus)
    return f"gpu:{typed}" if cluster.gpu_option == "gres" else typed


def setup_lines(modules: list[str], setup: list[str]) -> list[str]:
    """Shell lines that load the modules and do what the site wants. `module` is a shell function, which a batch shell
    may lack."""
    if not modules:
        return list(setup)
    look = [
        "for file in /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh; do",
        '  if ! command -v module >/dev/null 2>&1 && [ -r "$file" ]; then',
        "    # shellcheck source=/dev/null",
        '    . "$file"',
        "  fi",
        "done",
    ]
    missing = (
        f"cluster.modules={','.join(modules)}: this node has no command named module, nor a file in /etc/profile.d that "
        "makes it: leave cluster.modules empty, or let the admins install it"
    )
    told = f"command -v module >/dev/null 2>&1 || {{ echo {shlex.quote(missing)} >&2; (exit 127); }}"
    return [*look, told, f"module load {shlex.join(modules)}", *setup]


def render(job_name: str, folder: Path, parts: list[Component], cluster: ClusterConfig, command: str) -> str:
    """The script; ``command`` is the shell words that start the launcher, ``folder`` gets submitit's files."""
    lead_s = round(cluster.signal_lead_s)
    job_wide = {
        "job-name": job_name,
        "output": f"{folder}/%j_0_log.out",
        "error": f"{folder}/%j_0_log.err",
        "open-mode": "append",
        "requeue" if cluster.requeue else "no-requeue": "",
        # To the launcher alone, which orders the rest. It watches the clock too: Slurm may be a minute off.
        "signal": f"B:USR2@{lead_s}" if lead_s else "",
        "mail-user": cluster.mail_user,
        "mail-type": ",".join(cluster.mail_type),
        "licenses": cluster.licenses,
    }
    always = ("requeue", "no-requeue")
    shape = ", ".join(f"{part.name} ({part.nodes} node{'s' * (part.nodes > 1)})" for part in parts)
    lines = ["#!/bin/bash", f"# {job_name}: {shape}"]
    lines += [_sbatch_line(option) for option in job_wide.items() if option[1] or option[0] in always]
    lines += cluster.sbatch_lines
    for i, part in enumerate(parts):
        lines += ["#SBATCH hetjob"] if i else []
        lines += ["", f"# {part.name}", *map(_sbatch_line, part.options.items())]
    if lead_s:  # Slurm may send it a minute early, which can be at once; the launcher takes it over
        lines += ["", "trap '' USR2"]
    if setup := setup_lines(cluster.modules, cluster.setup):
        lines += ["", "# cluster.modules and cluster.setup", *setup]
    lines += ["", "export SUBMITIT_EXECUTOR=slurm", f"exec {command}", ""]
    return "\n".join(lines)


def _sbatch_line(option: tuple[str, str]) -> str:
    key, value = option
    return f"#SBATCH --{key}" + (f"={quoted(value)}" if value else "")


def quoted(value: str) -> str:
    """``value`` as one word for sbatch and for a shell alike. Unlike a shell, sbatch takes a backslash away between single
    quotes too."""
    if "\\" not in value:
        return shlex.quote(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
