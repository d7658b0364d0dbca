"""slurm.conf and its companions for the private clusters."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path

from prorl_hpc.slurm.private.shape import Shape

# The defaults make heterogeneous jobs wait half a minute for the backfill scheduler; and a requeue waits
# for credentials to expire.
_SCHEDULER = (
    "bf_interval=1,bf_hetjob_immediate,bf_continue,bf_window=60,bf_resolution=1,"
    "sched_interval=1,sched_min_interval=10000,batch_sched_delay=0"
)


def write_slurm_config(directory: Path, shape: Shape, local: dict[str, str], nodes: list[str]) -> None:
    """Write etc/slurm.conf, etc/gres.conf, a MUNGE key and fake GPU devices under ``directory``, and forget what an
    earlier cluster there knew of its nodes and jobs.

    ``local`` holds the controller's host, and the paths and ports that differ between the kinds of cluster; ``nodes``
    the NodeName lines.
    """
    for name in ("state", "spool"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("etc", "run", "log", "state", "spool", "munge", "gpus"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    key = directory / "munge" / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
    settings = {**_settings(directory), "KillWait": str(shape.kill_wait_s), **local, **shape.settings}
    lines = [f"{key}={value}" for key, value in settings.items()] + nodes + _partitions(shape)
    (directory / "etc" / "slurm.conf").write_text("\n".join(lines) + "\n")
    _write_gpus(directory, shape)
    if _slurm_version() >= (23, 11):
        (directory / "etc" / "cgroup.conf").write_text("CgroupPlugin=disabled\n")


def node_line(shape: Shape, name: str, address: str, host: str = "", port: int = 0) -> str:
    """A NodeName line; the node claims what ``shape`` says."""
    where = f"NodeHostname={host} " * bool(host) + f"Port={port} " * bool(port)
    gres = f" Gres=gpu:{shape.gpus}" * (name in shape.gpu_names)
    size = f"CPUs={shape.cpus} RealMemory={shape.memory_mib}"
    return f"NodeName={name} NodeAddr={address} {where}{size}{gres} State=UNKNOWN"


def _settings(directory: Path) -> dict[str, str]:
    user = pwd.getpwuid(os.getuid()).pw_name
    return {
        "ClusterName": "private",
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
        "InactiveLimit": "0",
        "MinJobAge": "600",
        "CompleteWait": "0",
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
    }


def _partitions(shape: Shape) -> list[str]:
    """One for each sort of node, and one over all that preempts the others."""
    limit = f"MaxTime={shape.max_minutes}"
    lines = [f"PartitionName=cpu Nodes={','.join(shape.cpu_names)} Default=YES {limit} PriorityTier=10"]
    if shape.gpu_names:
        lines.append(f"PartitionName=gpu Nodes={','.join(shape.gpu_names)} {limit} PriorityTier=10")
    return [*lines, f"PartitionName=urgent Nodes={','.join(shape.nodes)} {limit} PriorityTier=100"]


def _write_gpus(directory: Path, shape: Shape) -> None:
    """Imagined GPUs: File= must name character devices, and /dev/null exists everywhere."""
    lines = []
    if shape.gpu_names:
        for i in range(shape.gpus):
            link = directory / "gpus" / f"gpu{i}"
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        files = f"{directory}/gpus/gpu[0-{shape.gpus - 1}]" if shape.gpus > 1 else f"{directory}/gpus/gpu0"
        lines.append(f"NodeName={','.join(shape.gpu_names)} Name=gpu File={files}\n")
    (directory / "etc" / "gres.conf").write_text("".join(lines))


def _slurm_version() -> tuple[int, int]:
    """``slurm 22.05.8`` → (22, 5)."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    text = subprocess.run(["env", f"PATH={path}", "slurmd", "-V"], check=True, capture_output=True, text=True).stdout
    major, minor = text.split()[-1].split(".")[:2]
    return int(major), int(minor)
