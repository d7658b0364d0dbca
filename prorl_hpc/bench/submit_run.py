"""``python -m prorl_hpc.bench.submit_run RUN_DIR [ROLE=MODULE]``: submit a run directory that a bench has made.

On the login node of a private cluster, where the bench itself is not. ``ROLE=MODULE``: processes of that role run
another module than the real one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.plan import NodePlan, Plan, make_plan


def main(argv: list[str]) -> int:
    """Prints the job's id."""
    run = RunDirectory.open(Path(argv[0]))
    config = run.load_config()
    modules = dict(words.split("=", 1) for words in argv[1:])
    print(submit(run, config, with_modules(make_plan(config), modules)).record.job_id)
    return 0


def with_modules(plan: Plan, modules: dict[str, str]) -> Plan:
    """``plan`` with other modules, by role."""

    def replaced(node: NodePlan) -> NodePlan:
        processes = [msgspec.structs.replace(p, module=modules.get(p.role, p.module)) for p in node.processes]
        return NodePlan(processes)

    parts = [msgspec.structs.replace(part, nodes=[*map(replaced, part.nodes)]) for part in plan.components]
    return Plan(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
