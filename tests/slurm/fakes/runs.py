"""Run directories whose processes are fakes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import psutil

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.plan import Plan, make_plan
from prorl_hpc.transport.keys import RunKeys

FAKES = Path(__file__).resolve().parent.parent
"""What must be on PYTHONPATH for ``python -m fakes.process``."""


def fake_plan(config: ProrlConfig) -> Plan:
    """The plan of ``config`` with every module replaced by the fake one."""
    plan = make_plan(config)

    def faked(node: Any) -> Any:
        processes = [msgspec.structs.replace(p, module="fakes.process") for p in node.processes]
        return msgspec.structs.replace(node, processes=processes)

    components = [msgspec.structs.replace(c, nodes=[faked(n) for n in c.nodes]) for c in plan.components]
    return Plan(components)


def fake_config(root: Path, *, slurm: bool = False) -> ProrlConfig:
    """Short limits, no restarts; run directories under ``root``."""
    config = ProrlConfig()
    config.run = dataclasses.replace(
        config.run, name="fake", root=str(root / "runs"), start_timeout_s=30.0, stop_timeout_s=2.0, restarts=0
    )
    if slurm:
        config.cluster.kind = "slurm"
        config.cluster.time_minutes = 5
        config.cluster.rollout.nodes = 2
        config.cluster.rollout.partition = "cpu"
        config.cluster.rollout.cpus = 2
        config.cluster.inference.partition = "gpu"
        config.cluster.inference.gpus = 1
        config.cluster.trainer.partition = "gpu"
        config.cluster.trainer.cpus = 3
    return config


def fake_run(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> RunDirectory:
    run = RunDirectory.create(config)
    RunKeys.create(run.keys)
    (run.path / "fakes.json").write_text(json.dumps(acts))
    return run


def processes_of(run: RunDirectory) -> list[str]:
    """Command lines of all processes on this machine that carry the run's id in their environment or arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            bears = process.environ().get("PRORL_RUN_ID") == run.run_id or run.run_id in " ".join(process.cmdline())
            if bears and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found
