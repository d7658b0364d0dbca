"""What this site's Slurm offers: version, settings, partitions, nodes, reservations, and the user's accounts.

One call of each of Slurm's commands, all at once, each with a time limit: a controller that does not answer is told in
one sentence, ``Site.silent``.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prorl_hpc.slurm.site_records import (
    Association,
    Node,
    Partition,
    Qos,
    Reservation,
    Settings,
    Version,
    parse_associations,
    parse_nodes,
    parse_partitions,
    parse_qos,
    parse_reservations,
    parse_settings,
    parse_version,
)

CALL_LIMIT_S = 5.0
_HETEROGENEOUS_SINCE: Version = (20, 2)


@dataclass(frozen=True)
class Answer:
    """One command's. ``failed``: why it has nothing to say; empty when it has."""

    out: str = ""
    failed: str = ""


Ask = Callable[[list[str]], Answer]


@dataclass(frozen=True)
class Site:
    """``associations``: None where no accounting answers. ``silent``: why nothing else is known; then all is empty."""

    version: Version | None = None
    version_text: str = ""
    settings: Settings = field(default_factory=Settings)
    partitions: dict[str, Partition] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    user: str = ""
    associations: list[Association] | None = None
    qos: dict[str, Qos] = field(default_factory=dict)
    silent: str = ""

    @property
    def default_partition(self) -> Partition | None:
        return next((p for p in self.partitions.values() if p.default), None)

    def nodes_of(self, partition: str) -> list[Node]:
        return [node for node in self.nodes if partition in node.partitions]

    @property
    def heterogeneous(self) -> str:
        """Why heterogeneous jobs do not run here; empty if they do."""
        if self.version is not None and self.version < _HETEROGENEOUS_SINCE:
            return f"{self.version_text} is older than 20.02, from which on `#SBATCH hetjob` is known"
        scheduler = self.settings.get("SchedulerType")
        if scheduler and scheduler != "sched/backfill":
            return f"SchedulerType={scheduler}: only sched/backfill starts heterogeneous jobs"
        return ""


def run_command(command: list[str]) -> Answer:
    """What a command of Slurm says, within CALL_LIMIT_S."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CALL_LIMIT_S
        )
    except FileNotFoundError:
        return Answer(failed=f"{command[0]} is not on PATH")
    except subprocess.TimeoutExpired:
        return Answer(failed=f"`{' '.join(command)}` gave no answer in {CALL_LIMIT_S:.0f} s")
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return Answer(done.stdout, failed=f"`{' '.join(command)}`: {said[-1] if said else f'exit {done.returncode}'}")
    return Answer(done.stdout)


def slurm_is_here() -> bool:
    """Whether this machine has Slurm's commands at all."""
    return shutil.which("sbatch") is not None


def ask_site(ask: Ask = run_command, user: str = "") -> Site:
    """Ask once for everything."""
    user = user or getpass.getuser()
    commands = {
        "version": ["sbatch", "--version"],
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "show", "partition", "-o"],
        "nodes": ["scontrol", "show", "node", "-o"],
        "reservations": ["scontrol", "show", "reservation", "-o"],
        "associations": ["sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,partition,qos"],
        "qos": ["sacctmgr", "-nP", "show", "qos", "format=name,maxwall,flags"],
    }
    with ThreadPoolExecutor(len(commands)) as pool:
        said = dict(zip(commands, pool.map(ask, commands.values()), strict=True))
    text = said["version"].out.strip()
    if silent := next((said[name].failed for name in ("config", "partitions", "nodes") if said[name].failed), ""):
        return Site(parse_version(text), text, user=user, silent=silent)
    settings = parse_settings(said["config"].out)
    text = text or f"slurm {settings.get('SLURM_VERSION')}"
    accounting = None if said["associations"].failed else parse_associations(said["associations"].out)
    return Site(
        version=parse_version(text),
        version_text=text,
        settings=settings,
        partitions={p.name: p for p in parse_partitions(said["partitions"].out)},
        nodes=parse_nodes(said["nodes"].out),
        reservations={r.name: r for r in parse_reservations(said["reservations"].out)},
        user=user,
        associations=accounting,
        qos={q.name: q for q in parse_qos(said["qos"].out)} if accounting is not None else {},
    )


def controller_answers(ask: Ask = run_command) -> str:
    """Why this machine cannot talk to the controller (MUNGE, network, configuration); empty if it can."""
    answer = ask(["scontrol", "ping"])
    if answer.failed or " UP" not in answer.out:
        return answer.failed or answer.out.strip()
    return ""
