"""The nodes of an attempt: which host each node of the plan is, and its supervisor, one srun step per node.

A step of its own for each node, so that a lost node ends that step and no other.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ClusterConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.children import tail
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.script import setup_lines


class PlacedNode(msgspec.Struct, frozen=True):
    """Node ``rank`` of the plan is ``host``; its component is the ``group``-th of the job, whose own id is ``job_id``.
    In ``placement.json`` there is a list of these."""

    rank: int
    component: str
    host: str
    group: int
    job_id: str = ""


def place(plan: Plan, environ: Mapping[str, str]) -> list[PlacedNode]:
    """Hosts for the plan's nodes, in the order of the job's node lists. Raises RunError if the job has too few."""
    groups = int(environ.get("SLURM_HET_SIZE", "1"))
    if groups < len(plan.components):
        raise RunError(
            f"the plan has {len(plan.components)} components, this job {groups}: submit the run's own script"
        )
    placed: list[PlacedNode] = []
    for group, component in enumerate(plan.components):
        end = f"_HET_GROUP_{group}" if "SLURM_HET_SIZE" in environ else ""
        hosts = host_names(environ[f"SLURM_JOB_NODELIST{end}"])
        if len(hosts) < len(component.nodes):
            raise RunError(f"component {component.name} has {len(hosts)} nodes, its plan {len(component.nodes)}")
        job_id = environ[f"SLURM_JOB_ID{end}"]
        placed += [
            PlacedNode(len(placed) + i, component.name, host, group, job_id)
            for i, host in enumerate(hosts[: len(component.nodes)])
        ]
    return placed


def host_names(node_list: str) -> list[str]:
    """``gpu[01-02],login`` → its names, in order, as scontrol knows them."""
    if not re.search(r"[\[,]", node_list):
        return [node_list]
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"scontrol cannot read the node list {node_list}: {error}") from error
    if done.returncode != 0:
        raise RunError(f"scontrol cannot read the node list {node_list}: {done.stderr.strip()}")
    return done.stdout.split()


@dataclass
class Step:
    """The srun process of one node."""

    node: PlacedNode
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def log_says_node_failed(self) -> bool:
        """srun exits with 0 after "Node failure on …"."""
        return any("Node failure on" in line for line in tail(self.log, 20))

    def end(self) -> None:
        """Tell the supervisor to leave. SIGUSR2, since srun hands it on; at SIGTERM it kills its task."""
        self._send(signal.SIGUSR2)

    def kill(self) -> None:
        """Have srun kill its task."""
        self._send(signal.SIGTERM)

    def abandon(self) -> None:
        """Kill srun itself, with its shepherd, which would else have Slurm kill whatever step bears that number by then.
        Slurm ends the task with the job."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


def start_steps(run: RunDirectory, cluster: ClusterConfig, placed: Sequence[PlacedNode], groups: int) -> list[Step]:
    """Start the supervisor of every node; their output goes to ``logs/srun-<rank>.log``."""
    return [_start(run, srun_words(run, cluster, node, groups), node) for node in placed]


def _start(run: RunDirectory, words: list[str], node: PlacedNode) -> Step:
    log = srun_log(run, node.rank)
    with log.open("ab") as out:
        environ = step_environment(os.environ)
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
        )
        return Step(node, process, log)


def clean_up_words(run: RunDirectory, cluster: ClusterConfig, node: PlacedNode, groups: int) -> list[str]:
    """The command line of a step that removes what a supervisor that was killed left on its node."""
    words = ["srun", *_where(node, groups), "--overlap", "--mem=0", "--unbuffered", "--mpi=none", "--export=ALL"]
    cleaner = [sys.executable, "-m", "prorl_hpc.slurm.cleanup", str(run.path), str(node.rank)]
    return [*words, *cluster.srun_args, *cleaner]


def start_clean_up(run: RunDirectory, cluster: ClusterConfig, node: PlacedNode, groups: int) -> Step:
    """Start that step, on a node that still answers."""
    return _start(run, clean_up_words(run, cluster, node, groups), node)


def srun_words(run: RunDirectory, cluster: ClusterConfig, node: PlacedNode, groups: int) -> list[str]:
    """The command line of one node's step. Since Slurm 22.05 srun does not inherit --cpus-per-task. By itself Slurm
    binds a step of one task to all its CPUs or not at all, as the supervisor of several processes needs it; where no plugin
    binds, srun complains of any --cpu-bind."""
    component = getattr(cluster, node.component)
    words = ["srun", f"--job-name=prorl-{node.component}-{node.rank}", *_where(node, groups)]
    words += ["--no-kill", "--unbuffered", "--mpi=none", "--export=ALL"]
    words += [f"--cpu-bind={component.cpu_bind}"] if component.cpu_bind else []
    words += [f"--cpus-per-task={component.cpus}"] if component.cpus else []
    supervisor = [sys.executable, "-u", "-m", "prorl_hpc.slurm.node", str(run.path), str(run.attempt), str(node.rank)]
    return [*words, *cluster.srun_args, *_after_setup(cluster, component.setup, supervisor)]


def _where(node: PlacedNode, groups: int) -> list[str]:
    group = [f"--het-group={node.group}"] if groups > 1 else []
    return [*group, "--nodes=1", "--ntasks=1", f"--nodelist={node.host}"]


def _after_setup(cluster: ClusterConfig, own: list[str], command: list[str]) -> list[str]:
    """``command`` after the setup lines on that node; a line that fails ends the step."""
    lines = setup_lines(cluster.modules, [*cluster.setup, *own])
    return ["bash", "-c", "\n".join(["set -e", *lines, 'exec "$@"']), "bash", *command] if lines else command


_OF_THE_JOBS_TASKS = re.compile(
    r"^SLURM_(NTASKS|NPROCS|TASKS_PER_NODE|CPUS_PER_TASK|NTASKS_PER_NODE|NNODES|NODELIST|DISTRIBUTION|CPU_BIND.*|THREADS_PER_CORE"
    r"|TRES_PER_TASK|EXPORT_ENV)$"
)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What srun may see of the job: not the shape of its batch task, which is not that of our steps."""
    return {key: value for key, value in environ.items() if not _OF_THE_JOBS_TASKS.match(key)}


def allocation_end(job_id: str) -> float | None:
    """When Slurm will end the first of the job's components, in seconds since the epoch; None if it does not say."""
    command = ["squeue", "-h", "-j", job_id, "-o", "%e"]
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s"}  # whatever form the site or the user has chosen
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environ).stdout.split()
        return min(map(float, said), default=None)
    except (ValueError, OSError, subprocess.TimeoutExpired):
        return None


def srun_log(run: RunDirectory, rank: int) -> Path:
    """What the srun of a node says, and its supervisor before it has a log of its own."""
    return run.logs / f"srun-{rank}.log"
