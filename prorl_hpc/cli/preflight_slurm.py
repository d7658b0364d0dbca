"""Whether this site's Slurm can run the plan, asked before it is given the job."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.config.cluster_validation import cluster_errors
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.own_container_checks import container_problems
from prorl_hpc.slurm.plan_problems import plan_problems
from prorl_hpc.slurm.sbatch_options import check_extra, check_sbatch_lines, check_srun_args
from prorl_hpc.slurm.setup_checks import setup_problems
from prorl_hpc.slurm.site import Site, ask_site

_COMPONENTS = ("rollout", "inference", "trainer")


def slurm_problems(config: ProrlConfig, *, starting: bool = True) -> Iterator[str]:
    """Each as a sentence with its cure; nothing for a run on this machine but its containers. ``starting``: Slurm must
    be there; a dry run goes without."""
    yield from container_problems(config)
    cluster = config.cluster
    yield from setup_problems(cluster)
    if cluster.kind != "slurm":
        return
    if starting:
        yield from _silence(config)
    known = site_options()
    yield from check_extra("cluster.extra", cluster.extra, known)
    for name in _COMPONENTS:
        yield from check_extra(f"cluster.{name}.extra", getattr(cluster, name).extra, known)
    yield from check_sbatch_lines(cluster.sbatch_lines)
    yield from check_srun_args(cluster.srun_args)
    if not any(cluster_errors(config)) and not any(_silence(config)):
        yield from plan_problems(config, _site())


def _silence(config: ProrlConfig) -> Iterator[str]:
    """Why this site's Slurm cannot be asked."""
    absent = [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]
    if absent:
        yield (
            f"cluster=slurm needs {', '.join(absent)} on PATH: run this on a login node of the cluster, or leave "
            "cluster=slurm out to train on this machine"
        )
    elif _site().silent:
        yield from plan_problems(config, _site())


def _site() -> Site:
    """Asked once for all runs of a sweep."""
    return _site_of(os.environ.get("SLURM_CONF", ""), os.environ.get("PATH", ""))


@functools.cache
def _site_of(conf: str, path: str) -> Site:
    return ask_site()


def slurm_warnings(config: ProrlConfig, *, starting: bool = True) -> Iterator[str]:
    """What may be meant, and does harm if it is not; in a dry run, that there is no Slurm to ask."""
    if config.cluster.kind == "slurm" and not starting and not any(cluster_errors(config)):
        yield from _silence(config)
    if config.cluster.kind == "slurm" and _each_nodes_own(Path(config.run.root).absolute()):
        yield (
            f"run.root={config.run.root}: /{Path(config.run.root).absolute().parts[1]} is each node's own as a rule, and a "
            "job whose nodes do not see its run directory ends at once, without a word. Set run.root to storage that this "
            "machine and all nodes share, or make sure with `prorl-hpc doctor … --on-nodes`"
        )


def _each_nodes_own(path: Path) -> bool:
    """As a rule; not what a site has mounted below /tmp, as a cluster of one machine does with what its nodes share."""
    if path.parts[1:2] != ("tmp",):
        return path.parts[1:2] == ("dev",)
    return not any(place.is_mount() for place in (path, *path.parents) if len(place.parts) > 2)


def site_options() -> list[str]:
    """Long options that this site's sbatch lists, those of its plugins included; empty without an sbatch."""
    if shutil.which("sbatch") is None:
        return []
    text = subprocess.run(["sbatch", "--help"], capture_output=True, text=True).stdout
    return [word.removeprefix("--").split("=")[0].split("[")[0] for word in text.split() if word.startswith("--")]
