"""Sizes that no cluster has. They are refused before anything is counted out node by node or row by row, so that a slip
of the finger is answered at once."""

from __future__ import annotations

from collections.abc import Iterator

from prorl_hpc.config.policies import servers_on_node
from prorl_hpc.config.schema import ProrlConfig

MOST_NODES, MOST_PER_NODE, MOST_PROCESSES = 10_000, 1_024, 100_000
_MOST = {
    MOST_NODES: "cluster.rollout.nodes cluster.inference.nodes cluster.trainer.nodes",
    MOST_PER_NODE: "rollout.workers_per_node engine.servers_per_node engine.tensor_parallel trainer.ranks_per_node "
    "cluster.rollout.gpus cluster.inference.gpus cluster.trainer.gpus",
    65_536: "cluster.rollout.cpus cluster.inference.cpus cluster.trainer.cpus",
    1_000_000: "cluster.rollout.memory_gib cluster.inference.memory_gib cluster.trainer.memory_gib task.train.size "
    "task.heldout.size",
    10_000_000: "cluster.time_minutes",
}


def size_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    alone = [
        f"{name}={value}: must be at most {most:,}"
        for most, names in _MOST.items()
        for name in names.split()
        if (value := _value(config, name)) > most
    ]
    alone += [
        f"policies.{name}.servers_per_node={policy.servers_per_node}: must be at most {MOST_PER_NODE:,}"
        for name, policy in config.policies.items()
        if policy.servers_per_node > MOST_PER_NODE
    ]
    yield from alone
    if not alone:
        yield from _together(config)


def _together(config: ProrlConfig) -> Iterator[str]:
    cluster, one_machine = config.cluster, config.cluster.kind == "local"
    per_node = {
        "rollout": ("rollout.workers_per_node", config.rollout.workers_per_node),
        "inference": ("engine.servers_per_node", sum(servers_on_node(config).values())),
        "trainer": ("trainer.ranks_per_node", config.trainer.ranks_per_node),
    }
    for name, (setting, processes) in per_node.items():
        part = getattr(cluster, name)
        for _ in per_node:  # where several share nodes, those of the last one count
            part = getattr(cluster, part.same_nodes_as, part) if part.same_nodes_as in per_node else part
        nodes = 1 if one_machine else part.nodes
        if nodes * processes > MOST_PROCESSES:
            yield (
                f"{nodes} nodes of {name} with {setting}={processes} are {nodes * processes:,} processes: must be at most "
                f"{MOST_PROCESSES:,}: lower cluster.{name}.nodes or {setting}"
            )


def _value(config: ProrlConfig, name: str) -> float:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, int | float), name
    return value
