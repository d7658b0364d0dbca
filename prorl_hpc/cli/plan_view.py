"""``launch --dry-run``: the plan as a table, the sbatch script, and what sbatch says of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ComponentConfig, ProrlConfig
from prorl_hpc.slurm.plan import ComponentPlan, Plan, ProcessPlan

_HEAD = ("component", "nodes", "tasks", "CPUs", "GPUs", "memory", "partition", "processes", "sockets", "ports")
_SHOWN = 6


@dataclass(frozen=True)
class DryRun:
    """What to print. ``refused``: why Slurm would not take the job, or cannot say; empty if it would, or there is none."""

    text: str
    refused: str = ""


def dry_run(config: ProrlConfig, plan: Plan) -> DryRun:
    """What would be started; nothing is."""
    ending = "Nothing was started (--dry-run)."
    if config.cluster.kind != "slurm":
        local = "All of it on this machine, under one supervisor, started through submitit's local executor."
        return DryRun("\n\n".join([plan_text(config, plan), local, ending]))
    from prorl_hpc.slurm.executors import sbatch_text
    from prorl_hpc.slurm.refusals import ask_sbatch, explain_refusal, sbatch_words

    run = RunDirectory(Path(config.run.root).absolute() / "DATE" / f"{config.run.name}-ID")
    parts = [plan_text(config, plan), sbatch_text(run, config, plan).rstrip()]
    if shutil.which("sbatch") is None:
        return DryRun("\n\n".join([*parts, "There is no sbatch here to ask about this script.", ending]))
    opinion = ask_sbatch(sbatch_text(RunDirectory("/tmp/dry-run"), config, plan))
    refused = explain_refusal(opinion.said, config) if opinion.refused else ""
    if opinion.silent:
        refused = f"the plan is not checked, for Slurm does not answer here: {sbatch_words(opinion.said)}"
    return DryRun("\n\n".join([*parts, f"sbatch --test-only says: {opinion.said}", ending]), refused)


def plan_text(config: ProrlConfig, plan: Plan) -> str:
    """The table, who runs where, the totals, and what the end of the time brings."""
    rows = [_HEAD, *(_row(config, plan, component) for component in plan.components)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    parts = ["\n".join(table), "\n".join(_processes(plan)), "\n".join(_listeners(config, plan))]
    if config.cluster.kind == "slurm":
        parts.append("\n".join(_totals(config, plan)))
    return "\n\n".join(parts)


def _row(config: ProrlConfig, plan: Plan, component: ComponentPlan) -> tuple[str, ...]:
    """Sizes are per node; those left to the site show as ``-``."""
    found = [process for node in component.nodes for process in node.processes]
    listening = (
        str(len(found)),
        str(sum(len(_sockets(config, process)) for process in found)),
        str(sum(len(_ports(config, plan, process)) for process in found)),
    )
    if config.cluster.kind == "local":
        return (component.name, "1 (this machine)", "1", "-", "-", "-", "-", *listening)
    size: ComponentConfig = getattr(config.cluster, component.name)
    memory = f"{size.memory_gib:g} GiB" if size.memory_gib else "-"
    gpus = f"{size.gpus} {size.gpu_type}".strip() if size.gpus else "-"
    nodes = str(len(component.nodes))
    return (component.name, nodes, nodes, str(size.cpus or "-"), gpus, memory, size.partition or "-", *listening)


def _processes(plan: Plan) -> Iterator[str]:
    """One line for each node; of a component with many nodes, the middle is left out."""
    rank = 0
    for component in plan.components:
        lines = []
        for node in component.nodes:
            place = f"node {rank} ({component.name})" if len(plan.nodes) > 1 else "this node"
            lines.append(f"{place}: {_shortened([process.name for process in node.processes])}")
            rank += 1
        yield from lines if len(lines) <= _SHOWN else [*lines[:2], "…", lines[-1]]


def _listeners(config: ProrlConfig, plan: Plan) -> Iterator[str]:
    sockets = [name for process in plan.processes for name in _sockets(config, process)]
    ports = [text for process in plan.processes for text in _ports(config, plan, process)]
    yield f"sockets ({config.run.runtime_root}/prorl-…, and some for each sandbox): {_shortened(sockets)}"
    yield f"ports (the system picks those without a number): {_shortened(ports) or 'none'}"


def _shortened(names: list[str]) -> str:
    """A list of names; the middle of a long one is left out, and counted."""
    if len(names) <= 2 * _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])}, … {names[-1]} ({len(names)} in all)"


def _sockets(config: ProrlConfig, process: ProcessPlan) -> list[str]:
    """Unix sockets that the process listens on, in its node's runtime directory."""
    if process.role == "coordinator":
        return ["coordinator.zmq", "coordinator.http"]
    if process.llm_server:
        vllm = [f"{process.name}-vllm.sock"] if config.engine.kind in ("auto", "vllm") else []
        return [f"{process.name}.sock", *vllm]
    return []


def _ports(config: ProrlConfig, plan: Plan, process: ProcessPlan) -> list[str]:
    """TCP ports that the process listens on: between nodes, and the HTTP API's."""
    between_nodes = len(plan.nodes) > 1
    ports: list[str] = []
    if process.role == "coordinator":
        ports += ["coordinator: agents"] if between_nodes else []
        if config.rollout.http_tcp:
            number = f" {config.rollout.http_port}" if config.rollout.http_port else ""
            ports.append(f"coordinator: HTTP API{number}")
    elif process.llm_server and between_nodes:
        ports.append(f"{process.name}: workers")
        ports += [f"{process.name}: its nodes"] if process.world > 1 else []
    elif process.role == "trainer" and process.rank == 0 and process.world > 1:
        ports.append(f"{process.name}: ranks")
    return ports


def _totals(config: ProrlConfig, plan: Plan) -> Iterator[str]:
    cluster = config.cluster
    sizes: list[tuple[int, ComponentConfig]] = [(len(c.nodes), getattr(cluster, c.name)) for c in plan.components]
    hours = cluster.time_minutes / 60
    gpus = sum(nodes * size.gpus for nodes, size in sizes)
    cpus = sum(nodes * size.cpus for nodes, size in sizes)
    count = len(plan.nodes)
    job = "one heterogeneous job" if len(sizes) > 1 else "one job"
    cpu_hours = f", {round(cpus * hours, 2):g} CPU-hours" if all(size.cpus for _, size in sizes) else ""
    yield (
        f"{job} of {count} node{'s' * (count > 1)} for {cluster.time_minutes} min: at most "
        f"{round(gpus * hours, 2):g} GPU-hours{cpu_hours}{', for each attempt' if cluster.requeue else ''}"
    )
    after = (
        "the job goes back into the queue, and the run goes on as its next attempt"
        if cluster.requeue
        else "the job ends, and `prorl-hpc resume` goes on (cluster.requeue=false)"
    )
    trainer = "the trainer saves a checkpoint, " if config.trainer.enabled else ""
    yield (
        f"{cluster.signal_lead_s:g} s before the time limit: no rollout is started any more, {trainer}those under way "
        f"have {config.run.drain_s:g} s; then {after}"
    )
