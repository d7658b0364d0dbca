"""What each component of a plan asks Slurm for, by which settings, and how to name those to a person."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from prorl_hpc.config.schema import ClusterConfig, ProrlConfig
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.script import Component, components
from prorl_hpc.slurm.site_records import parse_gpus, parse_minutes

_SHOWN = 12


@dataclass(frozen=True)
class Ask:
    """What one component asks for, and by which settings. ``gpus``: by type, empty for any."""

    part: Component
    cluster: ClusterConfig
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    minutes: int | None

    def value(self, option: str) -> str:
        return self.part.options.get(option, "")

    def told(self, option: str, value: object = "") -> str:
        """``setting=value`` for an sbatch option."""
        return f"{setting_of(self.cluster, self.part.name, option)}={value or self.value(option)}"


def asks_of(config: ProrlConfig) -> list[Ask]:
    """One for each component of the job."""
    return [_ask(config.cluster, part) for part in components(config.cluster, make_plan(config))]


def setting_of(cluster: ClusterConfig, component: str, option: str) -> str:
    """The name of the setting that an sbatch option comes from."""
    own = getattr(cluster, component)
    for where, extra in ((f"cluster.{component}.extra", own.extra), ("cluster.extra", cluster.extra)):
        if option in extra:
            return f"{where}.{option}"
    of_site = {"time": "cluster.time_minutes", "account": "", "qos": "", "reservation": ""}
    if option in of_site and not getattr(own, option, ""):
        return of_site[option] or f"cluster.{option}"
    fields = {"mem": "memory_gib", "cpus-per-task": "cpus", "gpus-per-node": "gpus", "gres": "gpus"}
    return f"cluster.{component}.{fields.get(option, option)}"


def nearest(value: str, known: Iterable[str], what: str) -> str:
    """``did you mean …? partitions: …``"""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=2, cutoff=0.5)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"{what}: {shown or 'none'}"


def _ask(cluster: ClusterConfig, part: Component) -> Ask:
    options = part.options
    gpus = parse_gpus(options.get("gres", ""))
    if wanted := options.get("gpus-per-node"):
        gpus = parse_gpus(",".join(f"gpu:{word}" for word in wanted.split(",")))
    cpus = options.get("cpus-per-task", "")
    return Ask(
        part,
        cluster,
        int(cpus) if cpus.isdigit() else 1,
        _mib(options.get("mem", "")),
        gpus,
        parse_minutes(options["time"]),
    )


def _mib(text: str) -> int:
    """sbatch's --mem in MiB; 0 for none given."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if not found:
        return 0
    return int(int(found[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[found[2]])
