"""What is wrong with group ``cluster``: components that do not fit together, clocks, and words that Slurm would misread.

``wasted`` is for what is allowed and hardly meant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from prorl_hpc.config.cluster_words import cluster_words
from prorl_hpc.config.parallel import server_gpus_on_node
from prorl_hpc.config.policies import servers_on_node
from prorl_hpc.config.policy_validation import servers_told
from prorl_hpc.config.schema import ClusterConfig, ComponentConfig, ProrlConfig
from prorl_hpc.config.size_validation import MOST_PER_NODE

COMPONENTS = ("rollout", "inference", "trainer")
_MAY_DIFFER = ("nodes", "same_nodes_as", "container", "setup")


def cluster_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    merging = list(_merging(config.cluster))
    yield from merging
    if not merging:
        yield from _absent(config)
    if config.cluster.kind == "local":
        yield from _ignored_on_one_machine(config.cluster)
        return
    yield from cluster_words(config.cluster)
    yield from _clocks(config)
    if not merging:
        yield from _gpus(config)


def wasted(config: ProrlConfig) -> Iterator[str]:
    """Warnings: GPUs that nobody uses."""
    if config.cluster.kind == "local" or any(_merging(config.cluster)):
        return
    for host in _hosts(config.cluster):
        given = component(config.cluster, host).gpus
        used = sum(_gpus_used(config, guest) for guest in guests(config.cluster, host))
        if given > used:
            yield (
                f"cluster.{host}.gpus={given}: {given - used} of each node's GPUs stay idle; its processes use {used} "
                f"({_uses(config, host)})"
            )


def component(cluster: ClusterConfig, name: str) -> ComponentConfig:
    found: ComponentConfig = getattr(cluster, name)
    return found


def guests(cluster: ClusterConfig, host: str) -> list[str]:
    """The components that run on the nodes of component ``host``, itself included."""
    return [name for name in COMPONENTS if _host(cluster, name) == host]


def _host(cluster: ClusterConfig, name: str) -> str:
    for _ in COMPONENTS:
        name = component(cluster, name).same_nodes_as or name
    return name


def _hosts(cluster: ClusterConfig) -> list[str]:
    return [
        name for name in COMPONENTS if not component(cluster, name).same_nodes_as and component(cluster, name).nodes
    ]


def _merging(cluster: ClusterConfig) -> Iterator[str]:
    for name in COMPONENTS:
        other = component(cluster, name).same_nodes_as
        others = " or ".join(part for part in COMPONENTS if part != name)
        where = f"cluster.{name}.same_nodes_as={other}"
        if not other:
            continue
        if other not in COMPONENTS or other == name:
            yield f"{where}: must be {others}, or left out"
        elif component(cluster, _host(cluster, name)).same_nodes_as:
            yield f"{where}: these components name one another in a circle; leave it out for the one whose nodes they share"
        else:
            yield from _given_twice(cluster, name, _host(cluster, name))


def _given_twice(cluster: ClusterConfig, name: str, host: str) -> Iterator[str]:
    part, plain = component(cluster, name), ComponentConfig()
    given = [
        field.name
        for field in dataclasses.fields(part)
        if field.name not in _MAY_DIFFER and getattr(part, field.name) != getattr(plain, field.name)
    ]
    if part.nodes not in (plain.nodes, component(cluster, host).nodes):
        given.insert(0, "nodes")
    for setting in given:
        value = getattr(part, setting)
        yield (
            f"cluster.{name}.{setting}={value}: {name} runs on the nodes of {host} "
            f"(cluster.{name}.same_nodes_as): set cluster.{host}.{setting}, for all that runs there"
        )
    if not component(cluster, host).nodes:
        yield f"cluster.{host}.nodes=0: {name} is to run on those nodes (cluster.{name}.same_nodes_as): set it to 1 or more"


def _absent(config: ProrlConfig) -> Iterator[str]:
    cluster = config.cluster
    here = {name for host in _hosts(cluster) for name in guests(cluster, host)}
    if "rollout" not in here:
        yield (
            "cluster.rollout.nodes=0: the coordinator and the agents run there: set it to 1 or more, or let "
            "cluster.rollout.same_nodes_as name another component"
        )
    if config.trainer.enabled and "trainer" not in here:
        yield (
            "cluster.trainer.nodes=0 with trainer.enabled=true: set trainer.enabled=false for a trainer elsewhere "
            "(`prorl-hpc serve`), or give the trainer nodes"
        )
    if config.trainer.enabled and config.engine.outside:
        yield (
            f"engine.outside={','.join(config.engine.outside)} with trainer.enabled=true: LLM servers outside the run "
            "cannot take the trainer's weights: leave it out, or serve a trainer of your own (trainer.enabled=false)"
        )
    elif config.trainer.enabled and "inference" not in here:
        yield (
            "cluster.inference.nodes=0 with trainer.enabled=true: nobody would serve the policy that is trained: give "
            "inference nodes, or let cluster.inference.same_nodes_as name another component"
        )


def _clocks(config: ProrlConfig) -> Iterator[str]:
    cluster, run = config.cluster, config.run
    lead, needed, whole = cluster.signal_lead_s, run.drain_s + run.stop_timeout_s, cluster.time_minutes * 60
    if not math.isfinite(lead + needed) or cluster.time_minutes < 1:
        return  # told by the ranges
    together = f"run.drain_s={run.drain_s:g} and run.stop_timeout_s={run.stop_timeout_s:g}"
    if lead >= whole:
        more = f"cluster.time_minutes={math.floor(max(lead, needed) / 60) + 2} or more"
        fitting = max(math.ceil(needed), whole // 2)
        cure = f"set cluster.signal_lead_s={fitting}, or {more}" if fitting < whole else f"set {more}"
        yield (
            f"cluster.signal_lead_s={lead:g} leaves nothing of cluster.time_minutes={cluster.time_minutes} ({whole} s), "
            f"and leaving off takes {needed:g} s ({together}): {cure}"
        )
    elif lead < needed:
        if needed < whole:
            cure = f"set it to {needed:g} or more"
        else:
            cure = f"set it to {math.ceil(needed)} and cluster.time_minutes={math.floor(needed / 60) + 2} or more"
        yield (
            f"cluster.signal_lead_s={lead:g} is less than {together} together: the run would be cut off while it leaves "
            f"off; {cure}"
        )


def _gpus(config: ProrlConfig) -> Iterator[str]:
    parallel = server_gpus_on_node(config)
    for host in _hosts(config.cluster):
        given, names = component(config.cluster, host).gpus, guests(config.cluster, host)
        needed = sum(_gpus_used(config, name) for name in names)
        if 0 < given < needed:
            yield f"cluster.{host}.gpus={given}: its processes need {needed} per node: {_uses(config, host)}"
        elif given and names == ["inference"] and given % parallel:
            fitting = [str(n) for n in range(1, min(given, MOST_PER_NODE) + 1) if given % n == 0]
            yield (
                f"{_size_told(config)} does not divide cluster.inference.gpus={given}: "
                f"use {', '.join(fitting)}, or another number of GPUs"
            )


def _gpus_used(config: ProrlConfig, name: str) -> int:
    if name == "inference":
        return sum(servers_on_node(config).values()) * server_gpus_on_node(config)
    return config.trainer.ranks_per_node if name == "trainer" and config.trainer.enabled else 0


def _uses(config: ProrlConfig, host: str) -> str:
    trainer = config.trainer
    servers = f"({told})" if " plus " in (told := servers_told(config)) else told
    texts = {
        "inference": f"{servers} times {_size_told(config)}",
        "trainer": f"trainer.ranks_per_node={trainer.ranks_per_node}, a GPU of its own for each",
    }
    used = [texts[name] for name in guests(config.cluster, host) if _gpus_used(config, name)]
    return " and ".join(used) or "none of them uses one"


def _size_told(config: ProrlConfig) -> str:
    """GPUs of a server on one node, by the settings that are not 1."""
    engine = config.engine
    told = f"engine.tensor_parallel={engine.tensor_parallel}"
    if engine.pipeline_parallel > 1:
        told += f" times engine.pipeline_parallel={engine.pipeline_parallel}"
    return told + (f" over engine.nodes_per_server={engine.nodes_per_server}" if engine.nodes_per_server > 1 else "")


def _ignored_on_one_machine(cluster: ClusterConfig) -> Iterator[str]:
    """Sizes are ignored by a local run, as documented; what only Slurm understands is refused, not dropped."""
    plain, none = ClusterConfig(), ComponentConfig()
    names = (
        "account",
        "qos",
        "reservation",
        "licenses",
        "mail_user",
        "mail_type",
        "extra",
        "sbatch_lines",
        "srun_args",
    )
    given = {name: getattr(cluster, name) for name in names if getattr(cluster, name) != getattr(plain, name)}
    names = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "exclusive", "gpu_type")
    for part in COMPONENTS:
        for name in (*names, "cpu_bind", "extra"):
            value = getattr(component(cluster, part), name)
            if value != getattr(none, name):
                given[f"{part}.{name}"] = value
    for name, value in given.items():
        yield f"cluster.{name}={value} has no effect on one machine: use cluster=slurm, or leave it out"
