"""Why Slurm refused a job, in terms of our settings: sbatch speaks of its own options, and often of several at once."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.environment import submission_unset

_COMPONENTS = ("rollout", "inference", "trainer")
_TEST_LIMIT_S = 20.0


@dataclass(frozen=True)
class _Cause:
    """``said``: part of sbatch's message, any case; ``settings``: whose values can cause it, with ``*`` for each
    component; ``cure``: what is allowed, and how to find out."""

    said: str
    settings: str
    cure: str


_UNREACHABLE = (
    r"contact slurm controller|socket timed out|connection refused|zero bytes|communication|configuration source"
)

_CAUSES = [
    _Cause(
        r"invalid account|account/partition",
        "cluster.account cluster.*.account cluster.*.partition",
        "give an account that you may use there: `sacctmgr show assoc user=$USER format=account,partition,qos` lists them",
    ),
    _Cause(
        r"invalid qos",
        "cluster.qos cluster.*.qos",
        "give a QOS of your account: `sacctmgr show assoc user=$USER format=account,qos` lists them",
    ),
    _Cause(
        r"invalid partition|no partition specified",
        "cluster.*.partition",
        "give a partition of this site: `sinfo -s` lists them",
    ),
    _Cause(
        r"group not permitted to use this partition",
        "cluster.*.partition",
        "you may not use this partition: choose another (`sinfo -s`), or ask the admins",
    ),
    _Cause(
        r"reservation",
        "cluster.reservation cluster.*.reservation",
        "give one that exists and that you may use: `scontrol show reservation` lists them",
    ),
    _Cause(
        r"requested time limit|time limit is invalid",
        "cluster.time_minutes cluster.*.partition",
        "stay within the partition's limit (`sinfo -o '%P %l'`); with cluster.requeue=true a run goes on after each limit",
    ),
    _Cause(
        r"QOSMax\w*|AssocMax\w*|QOSGrp\w*|AssocGrp\w*|violates accounting/QOS policy|job submit limit",
        "cluster.account cluster.qos cluster.time_minutes cluster.*.nodes cluster.*.cpus cluster.*.memory_gib cluster.*.gpus",
        "ask for less, or wait until jobs of yours have ended: `sacctmgr show qos` and `sacctmgr show assoc user=$USER` "
        "tell the limits",
    ),
    _Cause(
        r"invalid generic resource|gres",
        "cluster.gpu_option cluster.*.gpus cluster.*.gpu_type cluster.extra cluster.*.extra",
        "ask for GPUs as this site names them: `sinfo -o '%P %G'`; some sites want cluster.gpu_option=gres",
    ),
    _Cause(
        r"license",
        "cluster.licenses",
        "give licences that Slurm knows: `scontrol show licenses` lists them",
    ),
    _Cause(
        r"invalid feature|constraint",
        "cluster.*.constraint",
        "give features that the nodes have: `sinfo -o '%P %f'` lists them",
    ),
    _Cause(
        r"invalid node name|requested node\(s\)|node list",
        "cluster.*.nodelist cluster.*.exclude",
        "give names of nodes of the partition: `sinfo -N` lists them",
    ),
    _Cause(
        r"node configuration is not available|partition configuration not available|more processors requested"
        r"|cpu count (per node|specification)|memory (specification|required)|node count specification|can not be satisfied",
        "cluster.*.partition cluster.*.nodes cluster.*.cpus cluster.*.memory_gib cluster.*.gpus cluster.*.gpu_type "
        "cluster.*.constraint",
        "no nodes of the partition have all of that: `sinfo -o '%P %D %c %m %G %f'` tells what they have "
        "(nodes, CPUs, MiB, GPUs, features)",
    ),
    _Cause(
        r"mail",
        "cluster.mail_user cluster.mail_type",
        "give an address and types such as [END,FAIL,TIME_LIMIT]",
    ),
    _Cause(
        r"unrecognized option|invalid option|invalid --|ambiguous",
        "cluster.extra cluster.*.extra cluster.sbatch_lines",
        "give options that this site's sbatch knows: `sbatch --help` lists them",
    ),
    _Cause(
        _UNREACHABLE,
        "",
        "the controller does not answer: nothing is wrong with the settings; see `scontrol ping` and try again",
    ),
    _Cause(
        r"munge|authentication|protocol auth",
        "",
        "MUNGE does not work on this machine: `munge -n | unmunge`; ask the admins",
    ),
    _Cause(r"temporarily unable|too many jobs", "", "the scheduler is full at the moment: try again later"),
]


@dataclass(frozen=True)
class Opinion:
    """sbatch's word on a script that was not submitted. ``silent``: it reached no controller, so it has no word."""

    said: str
    refused: bool
    silent: bool = False


def ask_sbatch(script: str) -> Opinion:
    """``sbatch --test-only``. A controller that does not answer has not refused."""
    unset = [word for name in submission_unset(os.environ) for word in ("-u", name)]
    command = ["env", *unset, "sbatch", "--test-only"]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=_TEST_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Opinion(f"no answer in {_TEST_LIMIT_S:g} s", refused=False, silent=True)
    said = (done.stdout + done.stderr).strip()
    silent = done.returncode != 0 and re.search(_UNREACHABLE, said, re.IGNORECASE) is not None
    return Opinion(said, refused=done.returncode != 0 and not silent, silent=silent)


def explain_refusal(text: str, config: ProrlConfig) -> str:
    """``text``: what sbatch printed, or an exception that holds it. What it said, and below that which settings cause
    it, with their values, and what is allowed."""
    said = sbatch_words(text)
    told = [f"Slurm refused the job: {said}"]
    for cause in _CAUSES:
        if re.search(cause.said, said, re.IGNORECASE):
            given = ", ".join(f"{name}={value}" for name, value in _given(cause.settings, config))
            told.append(f"{given}: {cause.cure}" if given else f"{_all_names(cause.settings)}{cause.cure}")
            break
    return "\n  ".join(told)


def sbatch_words(text: str) -> str:
    """sbatch's error lines, without its name before them."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(sbatch|allocation failure|srun):", line)]
    words = [re.sub(r"^(sbatch: )?(error: |fatal: )?", "", line) for line in lines]
    return "; ".join(dict.fromkeys(words)) or text.strip()


def _given(settings: str, config: ProrlConfig) -> Iterator[tuple[str, object]]:
    """Those that are not left to the site, with their values."""
    for name in _each(settings):
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        if value and _counts(name, config):
            yield name, value


def _counts(name: str, config: ProrlConfig) -> bool:
    """Not of a component that is absent, or on the nodes of another."""
    part = name.split(".")[1]
    if part not in _COMPONENTS:
        return True
    component = getattr(config.cluster, part)
    absent = part == "trainer" and not config.trainer.enabled
    return bool(component.nodes) and not component.same_nodes_as and not absent


def _each(settings: str) -> list[str]:
    return [
        name
        for pattern in settings.split()
        for name in ([pattern.replace("*", c) for c in _COMPONENTS] if "*" in pattern else [pattern])
    ]


def _all_names(settings: str) -> str:
    """For when none of them is set: that is what may be wrong."""
    names = ", ".join(pattern.replace("*", "<component>") for pattern in settings.split())
    return f"none of {names} is set: " if names else ""
