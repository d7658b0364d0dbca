"""Which process runs where: made once from the config, before anything is allocated, and stored as plan.json.

The embedded default is one component ``all`` with one node that hosts every process; on Slurm the
components are those of the heterogeneous job, in order: rollout, inference, trainer.
"""

from __future__ import annotations

import msgspec

from prorl_hpc.config.schema import ComponentConfig, ProrlConfig


class ProcessPlan(msgspec.Struct, frozen=True):
    """One process: ``python -m prorl_hpc.<module> --run-dir … --name …``. ``role``: coordinator, worker,
    inference or trainer. ``rank``/``world`` matter for trainers, ``index`` counts the role's processes."""

    name: str
    role: str
    module: str
    index: int = 0
    rank: int = 0
    world: int = 1


class NodePlan(msgspec.Struct, frozen=True):
    """The processes of one node, in start order."""

    processes: list[ProcessPlan]


class ComponentPlan(msgspec.Struct, frozen=True):
    name: str
    nodes: list[NodePlan]


class Plan(msgspec.Struct, frozen=True):
    components: list[ComponentPlan]

    @property
    def nodes(self) -> list[NodePlan]:
        """All nodes in global rank order."""
        return [node for component in self.components for node in component.nodes]

    @property
    def processes(self) -> list[ProcessPlan]:
        return [process for node in self.nodes for process in node.processes]

    @property
    def single_node(self) -> bool:
        return len(self.nodes) == 1


def make_plan(config: ProrlConfig) -> Plan:
    """The plan of ``config``; sizes of components count only on Slurm."""
    local = config.cluster.kind == "local"

    def count(component: ComponentConfig) -> int:
        return 1 if local else component.nodes

    coordinator = ProcessPlan("coordinator", "coordinator", "rollout")
    workers = _nodes_of("worker", "worker", count(config.cluster.rollout), config.rollout.workers_per_node)
    rollout = [NodePlan([coordinator] * (i == 0) + node.processes) for i, node in enumerate(workers)]
    inference = _nodes_of("inference", "inference", count(config.cluster.inference), config.engine.servers_per_node)
    trainer: list[NodePlan] = []
    if config.trainer.enabled:
        ranks = config.trainer.ranks_per_node
        world = ranks * count(config.cluster.trainer)
        trainer = [
            NodePlan(
                [
                    ProcessPlan(f"trainer-{r}", "trainer", "trainer", index=r, rank=r, world=world)
                    for r in range(i * ranks, (i + 1) * ranks)
                ]
            )
            for i in range(count(config.cluster.trainer))
        ]
    if local:
        everything = [p for node in (*rollout, *inference, *trainer) for p in node.processes]
        return Plan([ComponentPlan("all", [NodePlan(everything)])])
    named = [("rollout", rollout), ("inference", inference), ("trainer", trainer)]
    return Plan([ComponentPlan(name, nodes) for name, nodes in named if nodes])


def _nodes_of(role: str, module: str, nodes: int, per_node: int) -> list[NodePlan]:
    """``per_node`` processes on each node, numbered over all of them: ``worker-0``, ``worker-1``, …"""
    numbers = [range(i * per_node, (i + 1) * per_node) for i in range(nodes)]
    return [NodePlan([ProcessPlan(f"{role}-{n}", role, module, index=n) for n in some]) for some in numbers]
