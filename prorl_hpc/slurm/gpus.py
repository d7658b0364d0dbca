"""Which GPUs a process may use, found out without torch, and how the processes of a node share them.

What Slurm gives a step is told by a variable of the GPU's maker; its ids are numbers, or names such as GPU-… and MIG-….
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prorl_hpc.config.parallel import server_gpus_on_node
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.plan import NodePlan, host_of

NVIDIA, AMD, INTEL = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
_FURTHER = {AMD: ("HIP_VISIBLE_DEVICES", NVIDIA, "GPU_DEVICE_ORDINAL")}
"""Variables that count within what the first one leaves: they must go when it is set."""
_NONE = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Gpus:
    """``ids`` as ``variable`` takes them."""

    variable: str = NVIDIA
    ids: list[str] = field(default_factory=list)

    def given(self, environ: Mapping[str, str], ids: list[str]) -> dict[str, str]:
        """``environ`` for a process that may use these of them."""
        kept = {name: value for name, value in environ.items() if name not in _FURTHER.get(self.variable, ())}
        return {**kept, self.variable: ",".join(ids)}


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev"), sys: Path = Path("/sys")) -> Gpus:
    """Those of this process: the ones that the maker's variable lists, else (a node whose Slurm counts no GPUs) all of
    the machine."""
    if amd := _amd_gpus(devices, sys):
        listed = environ.get(AMD, environ.get("HIP_VISIBLE_DEVICES"))
        return Gpus(AMD, _ids(listed) if listed is not None else amd)
    numbers = [m.group(1) for path in devices.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))]
    if NVIDIA not in environ and INTEL in environ and not numbers:
        return Gpus(INTEL, _ids(environ[INTEL]))
    listed = environ.get(NVIDIA)
    return Gpus(NVIDIA, _ids(listed) if listed is not None else sorted(numbers, key=int))


def _ids(listed: str) -> list[str]:
    return [gpu.strip() for gpu in listed.split(",") if gpu.strip() not in _NONE]


def _amd_gpus(devices: Path, sys: Path) -> list[str]:
    """The kernel lists CPUs there too, which have no SIMD units."""
    if not (devices / "kfd").exists():
        return []
    nodes = (sys / "class/kfd/kfd/topology/nodes").glob("*/properties")
    count = sum(re.search(r"^simd_count [1-9]", node.read_text(), re.MULTILINE) is not None for node in nodes)
    return [str(i) for i in range(count)]


def split_gpus(node: NodePlan, config: ProrlConfig, gpus: list[str]) -> dict[str, list[str]]:
    """GPUs of each role on this node, none for coordinator and worker; empty on a node without GPUs. Within a role, the
    servers or ranks share them out by their local index (a server takes engine.tensor_parallel times
    engine.pipeline_parallel, spread over engine.nodes_per_server; a rank one). Two roles
    on one node get different GPUs; only on one machine of one's own, where there are too few, do they overlap. Raises
    RunError for a role that gets too few."""
    counts = {role: sum(p.role == role for p in node.processes) for role in ("inference", "trainer")}
    needs = {"inference": counts["inference"] * server_gpus_on_node(config), "trainer": counts["trainer"]}
    if not gpus:
        return {}
    local = config.cluster.kind == "local"
    for role, wanted in needs.items():
        if wanted > len(gpus):
            raise RunError(_too_few(f"the {counts[role]} {role} processes", wanted, gpus, [role], config))
    servers, ranks = needs["inference"], needs["trainer"]
    if servers + ranks > len(gpus) and not local:
        who = f"the {counts['inference']} inference and {ranks} trainer processes"
        raise RunError(_too_few(who, servers + ranks, gpus, list(needs), config))
    alone = not servers or not ranks
    shares = {"inference": gpus[:servers], "trainer": gpus[len(gpus) - ranks :]}
    return {"coordinator": [], "worker": []} | {role: gpus if alone else shares[role] for role in shares}


def _too_few(who: str, wanted: int, gpus: list[str], roles: list[str], config: ProrlConfig) -> str:
    cure = "" if config.cluster.kind == "local" else f"raise cluster.{host_of(config, roles[0])}.gpus, or "
    return (
        f"{who} of this node need {wanted} GPUs, it has {len(gpus)} ({', '.join(gpus)}): {cure}lower "
        "engine.servers_per_node, engine.tensor_parallel or trainer.ranks_per_node"
    )
