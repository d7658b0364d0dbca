"""Which process runs where: made once from the config, before anything is allocated, and stored as plan.json.

The embedded default is one component ``all`` with one node that hosts every process; on Slurm the
components are those of the heterogeneous job, in order: rollout, inference, trainer. The job's own nodes are found in
``placement.json`` of the attempt.
"""

from __future__ import annotations

import itertools

import msgspec
from msgspec.structs import replace

from prorl_hpc.config.policies import servers_on_node
from prorl_hpc.config.schema import TRAINED, ComponentConfig, ProrlConfig

COMPONENTS = ("rollout", "inference", "trainer")
"""In this order they are components of the job."""


class ProcessPlan(msgspec.Struct, frozen=True):
    """One process: ``python -m prorl_hpc.<module> --run-dir … --name …``. ``role``: coordinator, worker,
    inference or trainer. ``rank``/``world`` matter for trainers, and for the nodes of an LLM server that is spread over
    several; ``index`` counts the role's processes, of such a server all the same."""

    name: str
    role: str
    module: str
    index: int = 0
    rank: int = 0
    world: int = 1

    @property
    def llm_server(self) -> bool:
        """It is an LLM server, or leads one that is spread over several nodes."""
        return self.role == "inference" and self.rank == 0


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

    def component_of(self, rank: int) -> tuple[int, ComponentPlan]:
        """The component of a node, and its place among the components."""
        for place, component in enumerate(self.components):
            if rank < len(component.nodes):
                return place, component
            rank -= len(component.nodes)
        raise IndexError(f"the plan has no node {rank}")

    @property
    def single_node(self) -> bool:
        return len(self.nodes) == 1


def make_plan(config: ProrlConfig) -> Plan:
    """The plan of ``config``; on one machine, sizes of components do not count. A component with ``same_nodes_as`` is part
    of the one that it names; one without nodes is left out."""
    if config.cluster.kind == "local":
        parts = [_processes(config, name, 1) for name in COMPONENTS if _component(config, name).nodes]
        return Plan([ComponentPlan("all", [_together(parts, 0)])])
    planned = []
    for host in COMPONENTS:
        nodes = _component(config, host).nodes
        guests = [name for name in COMPONENTS if host_of(config, name) == host]
        if _component(config, host).same_nodes_as or not nodes:
            continue
        parts = [_processes(config, name, nodes) for name in guests]
        planned.append(ComponentPlan(host, [_together(parts, i) for i in range(nodes)]))
    return Plan([component for component in planned if any(node.processes for node in component.nodes)])


def host_of(config: ProrlConfig, name: str) -> str:
    """The component on whose nodes component ``name`` runs: its own name, or the one that ``same_nodes_as`` leads to."""
    for _ in COMPONENTS:
        name = _component(config, name).same_nodes_as or name
    return name


def _component(config: ProrlConfig, name: str) -> ComponentConfig:
    component: ComponentConfig = getattr(config.cluster, name)
    return component


def _together(parts: list[list[NodePlan]], i: int) -> NodePlan:
    return NodePlan([process for part in parts for process in part[i].processes])


def _processes(config: ProrlConfig, name: str, nodes: int) -> list[NodePlan]:
    """The processes of component ``name`` on each of ``nodes`` nodes."""
    if name == "rollout":
        coordinator = ProcessPlan("coordinator", "coordinator", "rollout")
        workers = _nodes_of("worker", "worker", nodes, config.rollout.workers_per_node)
        return [NodePlan([coordinator] * (i == 0) + node.processes) for i, node in enumerate(workers)]
    if name == "inference":
        return _inference(config, nodes)
    ranks = config.trainer.ranks_per_node if config.trainer.enabled else 0
    plain = _nodes_of("trainer", "trainer", nodes, ranks)
    numbered = [[replace(p, rank=p.index, world=ranks * nodes) for p in node.processes] for node in plain]
    return [NodePlan(processes) for processes in numbered]


def _inference(config: ProrlConfig, nodes: int) -> list[NodePlan]:
    """The LLM servers of all policies, ``inference-0``, … and ``inference-NAME-0``, …; ``index`` counts all of them."""
    if config.engine.nodes_per_server > 1:
        return [_node_of_server(i, config.engine.nodes_per_server) for i in range(nodes)]
    numbers, planned = itertools.count(), []
    for i in range(nodes):
        processes = []
        for policy, per_node in servers_on_node(config).items():
            name = "inference" if policy == TRAINED else f"inference-{policy}"
            for n in range(i * per_node, (i + 1) * per_node):
                processes.append(ProcessPlan(f"{name}-{n}", "inference", "inference", index=next(numbers)))
        planned.append(NodePlan(processes))
    return planned


def _node_of_server(node: int, nodes_per_server: int) -> NodePlan:
    """The one process of a node whose server is spread over several: the first one of them, rank 0, leads."""
    server, rank = divmod(node, nodes_per_server)
    name = f"inference-{server}" if rank == 0 else f"inference-{server}-node-{rank}"
    return NodePlan([ProcessPlan(name, "inference", "inference", server, rank, nodes_per_server)])


def _nodes_of(role: str, module: str, nodes: int, per_node: int) -> list[NodePlan]:
    """``per_node`` processes on each node, numbered over all of them: ``worker-0``, ``worker-1``, …"""
    numbers = [range(i * per_node, (i + 1) * per_node) for i in range(nodes)]
    return [NodePlan([ProcessPlan(f"{role}-{n}", role, module, index=n) for n in some]) for some in numbers]
