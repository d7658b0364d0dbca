"""What doctor says of the site's Slurm, and of a plan there."""

from __future__ import annotations

from collections.abc import Iterator

from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.plan_problems import plan_problems
from prorl_hpc.slurm.site import Site
from prorl_hpc.slurm.site_records import Partition

_TOLD = [
    "JobRequeue",
    "PreemptMode",
    "KillWait",
    "SlurmdTimeout",
    "MessageTimeout",
    "MinJobAge",
    "SelectTypeParameters",
    "GresTypes",
    "ProctrackType",
    "TaskPlugin",
    "LaunchParameters",
]
_SHORT_MEMORY_S = 60
_RULES = (
    ((20, 11), "steps do not share CPUs unless with --overlap"),
    ((22, 5), "srun takes --cpus-per-task from no sbatch option, it must be given again"),
    ((23, 11), "cgroups are asked for by cgroup.conf (CgroupPlugin)"),
)
"""Since which version which rule for srun holds; our steps give all of it themselves."""


def examine_site(site: Site, config: ProrlConfig) -> Iterator[Finding]:
    """``config`` counts where it is for Slurm."""
    if site.silent:
        cure = "Slurm is installed but not reachable from here: check SLURM_CONF, `scontrol ping` and munged"
        yield Finding("warn" if config.cluster.kind != "slurm" else "fail", "slurm", site.silent, cure)
        return
    yield _version(site)
    yield _rules(site)
    auth = site.settings.get("AuthType") or "authentication unknown"
    yield Finding("ok", "munge", f"{auth}: the controller answers this machine")
    yield from _accounting(site)
    yield from (_partition(site, p) for p in site.partitions.values())
    yield from _settings(site, config)
    yield from _plan(site, config)


def _version(site: Site) -> Finding:
    found = f"{site.version_text}; heterogeneous jobs run"
    if site.heterogeneous:
        cure = "put all components onto the same nodes (cluster.<component>.same_nodes_as), or ask the admins"
        return Finding("fail", "slurm", site.heterogeneous, cure)
    interval = next(
        (word for word in site.settings.words("SchedulerParameters") if word.startswith("bf_interval=")), ""
    )
    return Finding(
        "ok", "slurm", f"{found}, started by the backfill scheduler ({interval or 'every bf_interval, 30 s'})"
    )


def _rules(site: Site) -> Finding:
    if site.version is None:
        found = f"the version is not known from {site.version_text!r}"
        return Finding("warn", "srun", found, "the rules of Slurm 22.05 are followed: try doctor --on-nodes")
    held = [f"since {since[0]}.{since[1]:02d} {rule}" for since, rule in _RULES if site.version >= since]
    return Finding("ok", "srun", "; ".join(held) or "steps inherit and share what the job has")


def _accounting(site: Site) -> Iterator[Finding]:
    if site.associations is None:
        kept = site.settings.seconds("MinJobAge")
        long = kept is None or kept >= _SHORT_MEMORY_S
        found = f"none: job states come from squeue alone, which forgets ended jobs after {kept} s (MinJobAge)"
        cure = "ask the admins for MinJobAge=300 or accounting: how a job ended is forgotten before `status` sees it"
        yield judged("accounting", found, cure, good=long)
        return
    accounts = sorted({a.account for a in site.associations})
    enforce = ",".join(site.settings.words("AccountingStorageEnforce")) or "nothing"
    found = f"sacctmgr answers; accounts of {site.user}: {', '.join(accounts) or 'none'}; enforced: {enforce}"
    yield judged(
        "accounting", found, "ask the admins for an account", good=bool(accounts) or enforce in ("none", "nothing")
    )


def _partition(site: Site, partition: Partition) -> Finding:
    nodes = site.nodes_of(partition.name)
    up = sum(node.available for node in nodes)
    limit = "no time limit" if partition.max_minutes is None else f"at most {partition.max_minutes} minutes"
    kinds: dict[str, int] = {}
    for node in nodes:
        for kind, count in node.gpus.items():
            kinds[kind] = max(kinds.get(kind, 0), count)
    gpus = ", ".join(f"{n} GPUs{f' {kind}' if kind else ''}" for kind, n in sorted(kinds.items()))
    most = (
        f"up to {max(node.cpus for node in nodes)} CPUs, {max(n.memory_mib for n in nodes) / 1024:.0f} GiB"
        if nodes
        else ""
    )
    told = ", ".join(word for word in (f"{up} of {len(nodes)} nodes up", limit, most, gpus) if word)
    name = partition.name + (" (the default)" if partition.default else "")
    good = partition.state == "UP" and (up > 0 or not nodes)
    found = f"{name}: {told}" + ("" if partition.state == "UP" else f", {partition.state}")
    return judged("partition", found, "jobs there wait until the admins bring it up", good=good)


def _settings(site: Site, config: ProrlConfig) -> Iterator[Finding]:
    told = [f"{name}={site.settings.get(name) or 'none'}" for name in _TOLD]
    yield Finding("ok", "slurm settings", ", ".join(told).replace(" sec", " s"))
    kill_wait, needed = site.settings.seconds("KillWait"), config.run.stop_timeout_s
    if kill_wait is not None:
        found = f"{kill_wait} s from SIGTERM to SIGKILL, processes are given run.stop_timeout_s={needed:g}"
        cure = f"set run.stop_timeout_s below {kill_wait}: at a preemption Slurm kills what is still ending"
        yield judged("KillWait", found, cure, good=kill_wait > needed)
    tracked = site.settings.get("ProctrackType")
    if tracked and tracked != "proctrack/cgroup":
        cure = "ask the admins for proctrack/cgroup: Slurm then ends whatever a lost run leaves on a node"
        yield Finding("warn", "process tracking", f"{tracked}: what leaves its session can outlive a job", cure)
    if config.cluster.kind == "slurm" and config.cluster.requeue:
        default = "on" if site.settings.get("JobRequeue") == "1" else "off, which the run's own --requeue overrides"
        yield Finding("ok", "requeue", f"the site's default (JobRequeue) is {default}")


def _plan(site: Site, config: ProrlConfig) -> Iterator[Finding]:
    if config.cluster.kind != "slurm":
        return
    problems = plan_problems(config, site)
    for problem in problems:
        found, _, cure = problem.partition(";")
        yield Finding("fail", "plan", found, cure.strip() or "change the setting")
    if not problems:
        yield Finding("ok", "plan", "partitions, limits, accounts and nodes have what the components ask for")
