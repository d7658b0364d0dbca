"""What Slurm's commands print, of several versions; long lines are cut down to what is read, and some of what is not."""

from __future__ import annotations

from collections.abc import Callable

from prorl_hpc.slurm.site import Answer

# Slurm 22.05.8, a private cluster without accounting.
OLD = {
    "sbatch --version": "slurm-wlm 22.05.8\n",
    "scontrol show config": """Configuration data as of 2026-11-30T03:54:10
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/none
AuthType                = auth/munge
GresTypes               = gpu
JobRequeue              = 1
KillWait                = 10 sec
LaunchParameters        = (null)
MinJobAge               = 600 sec
ProctrackType           = proctrack/linuxproc
SchedulerParameters     = bf_interval=1,bf_hetjob_immediate,bf_continue
SchedulerType           = sched/backfill
SlurmctldHost[0]        = vm(127.0.0.1)
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/none

Slurmctld(primary) at vm is UP
""",
    "scontrol show partition": """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=02:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=cpu[01-02] State=UP TotalCPUs=16 \
TotalNodes=2 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=32000M,node=2,billing=16
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=02:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=gpu[01-02] State=UP TotalCPUs=16 \
TotalNodes=2 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=32000M,node=2,billing=16
""",
    "scontrol show node": "".join(
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.14 "
        f"AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} NodeAddr=127.0.0.1 NodeHostName=vm Version=22.05.8 "
        "OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 AllocMem=0 Sockets=8 State=IDLE ThreadsPerCore=1 "
        f"Partitions={partition}  BootTime=2026-11-29T16:49:24 CfgTRES=cpu=8,mem=16000M,billing=8 AllocTRES= CapWatts=n/a\n"
        for name, gres, partition in (
            ("cpu01", "(null)", "cpu"),
            ("cpu02", "(null)", "cpu"),
            ("gpu01", "gpu:2", "gpu"),
            ("gpu02", "gpu:2", "gpu"),
        )
    ),
    "scontrol show reservation": "No reservations in the system\n",
}

# Slurm 23.11, a site with accounting, types of GPUs, features and reservations.
NEW = {
    "sbatch --version": "slurm 23.11.10\n",
    "scontrol show config": """Configuration data as of 2025-02-03T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
AccountingStorageType   = accounting_storage/slurmdbd
AuthType                = auth/munge
GresTypes               = gpu,nvme
JobRequeue              = 0
KillWait                = 5 sec
MinJobAge               = 300 sec
PreemptMode             = CANCEL
ProctrackType           = proctrack/cgroup
SchedulerParameters     = (null)
SchedulerType           = sched/backfill
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 23.11.10

Cgroup Support Configuration:
CgroupPlugin            = autodetect
ConstrainRAMSpace       = yes

Slurmctld(primary) at mgmt1 is UP
""",
    "scontrol show partition": """\
PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 ExclusiveTopo=NO MaxNodes=4 MaxTime=2-00:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED \
MaxCPUsPerSocket=UNLIMITED Nodes=n[001-008] State=UP TotalCPUs=1024 TotalNodes=8 ResumeTimeout=GLOBAL \
TRES=cpu=1024,mem=2T,node=8,billing=1024
PartitionName=accel AllowGroups=ALL AllowAccounts=lab,proj1 AllowQos=normal,long DenyQos=(null) AllocNodes=ALL Default=NO \
QoS=part_accel DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 MaxCPUsPerNode=64 \
Nodes=a[01-02],h[01] State=UP TotalCPUs=384 TotalNodes=3 ReqResv=NO
PartitionName=event AllowAccounts=ALL DenyAccounts=proj1 AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=30 MinNodes=0 \
Nodes=a[01-02] State=DOWN TotalCPUs=256 TotalNodes=2 ReqResv=YES
""",
    "scontrol show node": "".join(
        f"NodeName=n{i:03} Arch=x86_64 CPUEfctv=128 CPUTot=128 AvailableFeatures=rome,ib ActiveFeatures=rome,ib Gres=(null) "
        "RealMemory=256000 MemSpecLimit=6000 State=MIXED+PLANNED Partitions=batch CfgTRES=cpu=128,mem=250G\n"
        for i in range(1, 9)
    )
    + """\
NodeName=a01 CPUEfctv=126 CPUTot=128 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1),nvme:1 RealMemory=512000 State=IDLE \
ThreadsPerCore=2 Partitions=accel,event Comment=State=none of that
NodeName=a02 CPUEfctv=126 CPUTot=128 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1),nvme:1 RealMemory=512000 \
State=IDLE+DRAIN ThreadsPerCore=2 Partitions=accel,event Reason=fan State=UP [root@2025-02-01T10:00:00]
NodeName=h01 CPUEfctv=128 CPUTot=128 AvailableFeatures=h100,nvlink Gres=gpu:h100:8(S:0-1) RealMemory=1024000 State=DOWN* \
Partitions=accel
""",
    "scontrol show reservation": """\
ReservationName=course StartTime=2025-02-03T08:00:00 EndTime=2025-02-03T18:00:00 Duration=10:00:00 Nodes=a[01-02] NodeCnt=2 \
Features=(null) PartitionName=accel Flags=SPEC_NODES TRES=cpu=256 Users=ann,bob Groups=(null) Accounts=(null) State=ACTIVE
""",
    "sacctmgr -nP show assoc": "lab||normal,long\nproj1||normal\nold|batch|normal\n",
    "sacctmgr -nP show qos": "normal|1-00:00:00|\nlong||PartitionTimeLimit\ndebug|00:30:00|\n",
}


def site_that_says(texts: dict[str, str]) -> Callable[[list[str]], Answer]:
    """An `ask` for ask_site that answers with these texts."""

    def ask(command: list[str]) -> Answer:
        line = " ".join(command)
        text = next((text for begin, text in texts.items() if line.startswith(begin)), None)
        return Answer(failed=f"`{line}`: no such plugin") if text is None else Answer(text)

    return ask
