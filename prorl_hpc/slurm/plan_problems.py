"""What of a plan this site's Slurm cannot give: each as a sentence that names the setting, the value, what is allowed.

Only what can never be is a problem; a node that is down today is none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.plan_asks import Ask, asks_of, nearest, setting_of
from prorl_hpc.slurm.plan_rights import right_problems
from prorl_hpc.slurm.site import Site
from prorl_hpc.slurm.site_records import Node, Partition, expand_hosts

_NOT_TWICE = "and a heterogeneous job gives no node to two components: merge them with same_nodes_as"


def plan_problems(config: ProrlConfig, site: Site) -> list[str]:
    """All that is wrong with the plan at this site; one sentence if the site does not answer."""
    if config.cluster.kind != "slurm":
        return []
    if site.silent:
        return [
            f"Slurm does not answer here, so the plan cannot be checked: {site.silent}. Check SLURM_CONF and "
            "`scontrol ping`, or ask the admins whether the controller is down"
        ]
    asked = asks_of(config)
    problems = [site.heterogeneous] if len(asked) > 1 and site.heterogeneous else []
    for ask in asked:
        problems += _of_component(ask, site)
    return list(dict.fromkeys(problems or _together(asked, site)))


def _of_component(ask: Ask, site: Site) -> list[str]:
    names = [name for name in ask.value("partition").split(",") if name]
    if not names:
        if site.default_partition is None:
            told = setting_of(ask.cluster, ask.part.name, "partition")
            return [f"{told} is empty and this site has no default; {nearest('', site.partitions, 'partitions')}"]
        names = [site.default_partition.name]
    unknown = [name for name in names if name not in site.partitions]
    if unknown:
        told = ask.told("partition", ",".join(names))
        return [f"{told}: there is no partition {n}; {nearest(n, site.partitions, 'partitions')}" for n in unknown]
    found = [[*_limits(ask, site, site.partitions[n]), *right_problems(ask, site, site.partitions[n])] for n in names]
    if not all(found):  # Slurm takes any of the list
        return []
    return [problem for problems in found for problem in problems]


def _limits(ask: Ask, site: Site, partition: Partition) -> Iterator[str]:
    name = partition.name
    if partition.state in ("DOWN", "INACTIVE"):
        yield f"{ask.told('partition', name)} is {partition.state} at this site: choose another, or ask the admins"
    lifted = any("PartitionTimeLimit" in flag for flag in _qos_flags(ask, site))
    if ask.minutes and partition.max_minutes is not None and ask.minutes > partition.max_minutes and not lifted:
        yield (
            f"{ask.told('time')} is {ask.minutes} minutes, partition {name} allows at most {partition.max_minutes}; with "
            "cluster.requeue=true a run goes on after each limit"
        )
    most = min(n for n in (partition.max_nodes, partition.total_nodes) if n is not None)
    if ask.part.nodes > most:
        whose = f"MaxNodes={most}" if most < partition.total_nodes else f"{most} in all"
        yield f"{ask.told('nodes')}: partition {name} gives at most {most} nodes to a job ({whose})"
    elif ask.part.nodes < partition.min_nodes:
        yield f"{ask.told('nodes')}: partition {name} takes jobs of at least {partition.min_nodes} nodes (MinNodes)"
    yield from _nodes(ask, site.nodes_of(name), partition)


def _qos_flags(ask: Ask, site: Site) -> tuple[str, ...]:
    qos = site.qos.get(ask.value("qos"))
    return qos.flags if qos else ()


def _nodes(ask: Ask, nodes: list[Node], partition: Partition) -> Iterator[str]:
    """Whether the partition's nodes have, each by itself and all at once, what is asked for."""
    if not nodes:
        return
    where = f"partition {partition.name}"
    problems = [*_names(ask, nodes, where), *_features(ask, nodes, where)]
    most = min(max(node.cpus for node in nodes), partition.max_cpus_per_node or 10**9)
    if ask.cpus > most:
        problems.append(f"{ask.told('cpus-per-task')}: no node of {where} gives more than {most} CPUs")
    most = min(max(node.memory_mib for node in nodes), partition.max_memory_mib_per_node or 10**9)
    if ask.memory_mib > most:
        asked = f"{ask.memory_mib / 1024:g}" if ask.told("mem").startswith(f"cluster.{ask.part.name}.memory") else ""
        problems.append(
            f"{ask.told('mem', asked)}: no node of {where} gives more than {most / 1024:.1f} GiB ({most} MiB)"
        )
    problems += _gpus(ask, nodes, where)
    yield from problems
    fit = [node for node in nodes if _fits(ask, node)]
    if not problems and len(fit) < ask.part.nodes <= len(nodes):
        yield (
            f"{ask.told('nodes')}: {len(fit)} of the {len(nodes)} nodes of {where} have all at once that "
            f"cluster.{ask.part.name} asks for ({_wanted(ask)})"
        )


def _fits(ask: Ask, node: Node) -> bool:
    needed = _plain_features(ask.value("constraint"))
    return (
        node.cpus >= ask.cpus
        and node.memory_mib >= ask.memory_mib
        and all(node.gpus_of(kind) >= n for kind, n in ask.gpus.items())
        and (needed is None or needed <= set(node.features))
        and node.name not in expand_hosts(ask.value("exclude"))
    )


def _wanted(ask: Ask) -> str:
    told = [f"{ask.cpus} CPUs"]
    told += [f"{ask.memory_mib} MiB"] if ask.memory_mib else []
    told += [f"{n} GPUs{f' {kind}' if kind else ''}" for kind, n in ask.gpus.items()]
    told += [f"{key} {ask.value(key)}" for key in ("constraint", "exclude") if ask.value(key)]
    return ", ".join(told)


def _gpus(ask: Ask, nodes: list[Node], where: str) -> Iterator[str]:
    option = "gres" if "gres" in ask.part.options else "gpus-per-node"
    setting = setting_of(ask.cluster, ask.part.name, option)
    own = setting == f"cluster.{ask.part.name}.gpus"
    kinds = {kind for node in nodes for kind in node.gpus if kind}
    for kind, wanted in ask.gpus.items():
        most = max(node.gpus_of(kind) for node in nodes)
        told = f"{setting}={wanted}" if own else ask.told(option)
        if wanted <= most:
            continue
        if not any(node.gpus for node in nodes):
            yield f"{told}: the nodes of {where} have no GPUs; choose another partition"
        elif most == 0:
            told = f"cluster.{ask.part.name}.gpu_type={kind}" if own else told
            yield f"{told}: no node of {where} has GPUs of type {kind}; {nearest(kind, kinds, 'types')}"
        else:
            of_type = f" of type {kind}" if kind else ""
            yield f"{told}: no node of {where} has more than {most} GPUs{of_type}"


def _names(ask: Ask, nodes: list[Node], where: str) -> Iterator[str]:
    known = {node.name for node in nodes}
    for option in ("nodelist", "exclude"):
        unknown = [name for name in expand_hosts(ask.value(option)) if name not in known]
        if unknown and (option == "nodelist" or len(unknown) == len(expand_hosts(ask.value(option)))):
            yield f"{ask.told(option)}: {where} has no node {unknown[0]}; {nearest(unknown[0], known, 'nodes')}"


def _features(ask: Ask, nodes: list[Node], where: str) -> Iterator[str]:
    known = {feature for node in nodes for feature in node.features}
    for word in _feature_words(ask.value("constraint")):
        if word not in known:
            yield f"{ask.told('constraint')}: no node of {where} has the feature {word}; {nearest(word, known, 'features')}"


def _feature_words(constraint: str) -> list[str]:
    """The names in ``a100&(nvlink|ib)*2``."""
    return [word for word in re.split(r"[&|,\[\]()!]+", re.sub(r"\*\d+", "", constraint)) if word]


def _plain_features(constraint: str) -> set[str] | None:
    """The features that each node must have; None where the expression says more than that."""
    return set(_feature_words(constraint)) if not re.search(r"[|\[\]()*!]", constraint) else None


def _together(asked: list[Ask], site: Site) -> list[str]:
    """Whether there are different nodes for all components: a heterogeneous job gives no node to two of them. For any
    choice of components there must be as many fitting nodes as they ask for (Hall's condition, exact)."""
    listed = [set(expand_hosts(ask.value("nodelist"))) for ask in asked]
    for (one, its), (other, others) in itertools.combinations(zip(asked, listed, strict=True), 2):
        if shared := sorted(its & others):
            return [f"{one.told('nodelist')} and {other.told('nodelist')} both name {shared[0]}, {_NOT_TWICE}"]
    fitting = [{node.name for node in _candidates(ask, site) if _fits(ask, node)} for ask in asked]
    for size in range(2, len(asked) + 1):
        for chosen in itertools.combinations(range(len(asked)), size):
            wanted = sum(asked[i].part.nodes for i in chosen)
            there = set.union(*(fitting[i] for i in chosen))
            if wanted > len(there) > 0:
                who = " and ".join(f"cluster.{asked[i].part.name}" for i in chosen)
                return [
                    f"{who} need {wanted} different nodes at the same time, {len(there)} have what they ask for: ask for "
                    "fewer nodes, use another partition, or put components onto the same nodes (same_nodes_as)"
                ]
    return []


def _candidates(ask: Ask, site: Site) -> list[Node]:
    """Nodes of the partitions that the component names, or of the default one."""
    default = site.default_partition.name if site.default_partition else ""
    names = set((ask.value("partition") or default).split(","))
    return [node for node in site.nodes if names & set(node.partitions)]
