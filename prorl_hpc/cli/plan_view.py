"""``launch --dry-run``: the plan as a table, and the sbatch script where there is one."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ComponentConfig, ProrlConfig
from prorl_hpc.slurm.executors import sbatch_opinion, sbatch_text
from prorl_hpc.slurm.plan import ComponentPlan, Plan

_HEAD = ("component", "nodes", "cpus", "gpus", "memory", "partition", "processes")


def dry_run_text(config: ProrlConfig, plan: Plan) -> str:
    """What would be started; nothing is."""
    parts = [plan_table(config, plan)]
    if config.cluster.kind == "slurm":
        run = RunDirectory(Path(config.run.root).absolute() / "DATE" / f"{config.run.name}-ID")
        script = sbatch_text(run, config, plan)
        opinion = sbatch_opinion(sbatch_text(RunDirectory("/tmp/dry-run"), config, plan))
        parts += [script.rstrip()]
        parts += [
            f"sbatch --test-only says: {opinion}" if opinion else "there is no sbatch here to ask about this script"
        ]
    else:
        parts.append("All of it on this machine, under one supervisor, started through submitit's local executor.")
    return "\n\n".join([*parts, "Nothing was started (--dry-run)."])


def plan_table(config: ProrlConfig, plan: Plan) -> str:
    """One row per component; sizes left to the site show as ``-``."""
    rows = [_HEAD, *(_row(config, component) for component in plan.components)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if config.cluster.kind == "slurm":
        lines += ["", f"time limit {config.cluster.time_minutes} min; GPU hours at most {_gpu_hours(config, plan):g}"]
    return "\n".join(lines)


def _row(config: ProrlConfig, component: ComponentPlan) -> tuple[str, ...]:
    names = ", ".join(process.name for node in component.nodes for process in node.processes)
    if config.cluster.kind == "local":
        return (component.name, "this machine", "-", "-", "-", "-", names)
    size: ComponentConfig = getattr(config.cluster, component.name)
    memory = f"{size.memory_gib:g} GiB" if size.memory_gib else "-"
    numbers = (str(len(component.nodes)), str(size.cpus or "-"), str(size.gpus or "-"))
    return (component.name, *numbers, memory, size.partition or "-", names)


def _gpu_hours(config: ProrlConfig, plan: Plan) -> float:
    gpus: int = sum(len(c.nodes) * getattr(config.cluster, c.name).gpus for c in plan.components)
    return round(gpus * config.cluster.time_minutes / 60, 2)
