"""What both kinds of private cluster share."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.slurm.private.shape import LOGIN, Shape

_IN_SERVICE = ("idle", "mixed", "allocated", "completing")


def search_path() -> str:
    """PATH with the places where daemons and ``ip`` lie, which users often lack."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing(kind: str) -> str:
    """Why a cluster of ``kind`` cannot run here; empty if it can."""
    programs = ["slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue"]
    if kind == "namespaced":
        programs += ["ip", "unshare", "nsenter"]
        if os.getuid() != 0:
            return "namespaced nodes need root"
        if subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True).returncode != 0:
            return "this machine does not allow new network, mount and PID namespaces"
    absent = [p for p in programs if shutil.which(p, path=search_path()) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class PrivateSlurm(ABC):
    """One cluster in ``directory``. Constructing it touches nothing."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.directory = directory.absolute()
        self.shape = shape

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def shared(self) -> Path:
        """A directory that all nodes see."""
        path = self.directory / "shared"
        path.mkdir(exist_ok=True)
        return path

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    def environment(self) -> list[str]:
        """``env`` and the variables with which a command finds this cluster."""
        return ["env", f"SLURM_CONF={self.conf}", f"PATH={search_path()}"]

    def command(self, argv: list[str], node: str = LOGIN) -> list[str]:
        """``argv`` as a command line that runs on ``node``, by default the login node."""
        return [*self.environment(), *argv]

    def run(self, argv: list[str], timeout_s: float = 60.0, node: str = LOGIN) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on ``node`` and wait for it."""
        return subprocess.run(self.command(argv, node), capture_output=True, text=True, timeout=timeout_s)

    @abstractmethod
    def start(self) -> None:
        """Bring everything up, until every node is idle."""

    @abstractmethod
    def stop(self) -> None:
        """End every process of the cluster and of its jobs; does no harm where there are none."""

    @abstractmethod
    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the node's slurmd alone: steps under way go on, and the controller hears no more of the node."""

    @abstractmethod
    def start_slurmd(self, node: str) -> None:
        """Start it again, until the node is in service."""

    def states(self) -> dict[str, str]:
        """Node → Slurm's state for it, such as ``idle`` or ``down*`` (``*``: it does not answer)."""
        said = self.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout
        return dict(line.split() for line in said.splitlines())

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until every node is idle. Raises TimeoutError."""
        self._wait_for(lambda states: states == dict.fromkeys(self.shape.nodes, "idle"), timeout_s)

    def wait_in_service(self, node: str, timeout_s: float = 30.0) -> None:
        """Until jobs can start on the node or run there. Raises TimeoutError."""
        # Its slurmd is asked too: a node that went away a moment ago is in service still, as far as the controller knows.
        asking = ["env", f"SLURMD_NODENAME={node}", "scontrol", "show", "slurmd"]
        self._wait_for(
            lambda states: states.get(node) in _IN_SERVICE and self.run(asking, node=node).returncode == 0, timeout_s
        )

    def _wait_for(self, reached: Callable[[dict[str, str]], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        states: dict[str, str] = {}
        while time.monotonic() < deadline:
            if reached(states := self.states()):
                return
            time.sleep(0.05)
        raise TimeoutError(
            f"the private Slurm cluster in {self.directory} did not come up in {timeout_s:.0f} s: nodes {states or 'unknown'};"
            f" see {self.directory}/log"
        )

    def cancel_jobs(self, timeout_s: float = 20.0) -> None:
        """End all jobs, so that no step outlives the daemons; gives up where the controller does not answer."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run(["scancel", "-u", str(os.getuid())], timeout_s)
            while time.monotonic() < deadline:
                listed = self.run(["squeue", "-h"], timeout_s)
                if listed.returncode != 0 or not listed.stdout.strip():
                    return
                time.sleep(0.1)
