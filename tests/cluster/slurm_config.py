"""slurm.conf and its companions for the private clusters: four CPU nodes and two GPU nodes of the imagination."""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
from pathlib import Path

CPU_NODES = ("cpu01", "cpu02", "cpu03", "cpu04")
GPU_NODES = ("gpu01", "gpu02")
NODES = CPU_NODES + GPU_NODES
LOGIN = "login"

# The defaults make heterogeneous jobs wait half a minute for the backfill scheduler; and a requeue waits
# for credentials to expire.
_SCHEDULER = (
    "bf_interval=1,bf_hetjob_immediate,bf_continue,bf_window=60,bf_resolution=1,"
    "sched_interval=1,sched_min_interval=10000,batch_sched_delay=0"
)


def write_slurm_config(directory: Path, controller: str, local: dict[str, str], nodes: list[str]) -> None:
    """Write etc/slurm.conf, etc/gres.conf, a MUNGE key and fake GPU devices under ``directory``.

    ``controller`` is the SlurmctldHost value, ``local`` holds the paths and ports that differ between the
    kinds of cluster, ``nodes`` the NodeName lines.
    """
    for name in ("etc", "run", "log", "state", "spool", "munge", "gpus"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    key = directory / "munge" / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
    # File= must name character devices; these two exist everywhere.
    for name, device in (("gpu0", "/dev/null"), ("gpu1", "/dev/zero")):
        link = directory / "gpus" / name
        link.unlink(missing_ok=True)
        link.symlink_to(device)
    user = pwd.getpwuid(os.getuid()).pw_name
    settings = {
        "ClusterName": "private",
        "SlurmctldHost": controller,
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "StateSaveLocation": str(directory / "state"),
        "SlurmctldLogFile": str(directory / "log" / "slurmctld.log"),
        "SlurmdLogFile": str(directory / "log" / "%n.log"),
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SlurmdParameters": "config_overrides",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": _SCHEDULER,
        "PriorityType": "priority/basic",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "ReturnToService": "2",
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "10",
        "TCPTimeout": "2",
        "MessageTimeout": "10",
        "KillWait": "10",
        "InactiveLimit": "0",
        "MinJobAge": "600",
        "CompleteWait": "0",
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
        **local,
    }
    lines = [f"{key}={value}" for key, value in settings.items()] + nodes
    cpus, gpus = ",".join(CPU_NODES), ",".join(GPU_NODES)
    lines += [
        f"PartitionName=cpu Nodes={cpus} Default=YES MaxTime=120 PriorityTier=10",
        f"PartitionName=gpu Nodes={gpus} MaxTime=120 PriorityTier=10",
        f"PartitionName=urgent Nodes={cpus},{gpus} MaxTime=120 PriorityTier=100",
    ]
    (directory / "etc" / "slurm.conf").write_text("\n".join(lines) + "\n")
    (directory / "etc" / "gres.conf").write_text(f"NodeName={gpus} Name=gpu File={directory}/gpus/gpu[0-1]\n")
    if _slurm_version() >= (23, 11):
        (directory / "etc" / "cgroup.conf").write_text("CgroupPlugin=disabled\n")


def node_line(name: str, address: str, host: str = "", port: int = 0) -> str:
    """A NodeName line; every node claims 8 CPUs and 16 GB, whatever the machine has."""
    where = f"NodeHostname={host} " * bool(host) + f"Port={port} " * bool(port)
    gres = " Gres=gpu:2" * (name in GPU_NODES)
    return f"NodeName={name} NodeAddr={address} {where}CPUs=8 RealMemory=16000{gres} State=UNKNOWN"


def _slurm_version() -> tuple[int, int]:
    """``slurm 22.05.8`` → (22, 5)."""
    text = subprocess.run(["slurmd", "-V"], check=True, capture_output=True, text=True).stdout
    major, minor = text.split()[-1].split(".")[:2]
    return int(major), int(minor)
