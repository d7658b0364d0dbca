"""The realistic private cluster of ``bench launch``, and the runs that it carries: two CPU nodes, an inference node, a
trainer node."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import prorl_hpc
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.private.base import missing
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
from prorl_hpc.slurm.private.opening import open_cluster
from prorl_hpc.transport.keys import RunKeys

_LOOK_S = 0.02
_CALL_S = 60.0
KILL_WAIT_S = 30
"""Slurm's own default: between SIGTERM and SIGKILL of a job that is requeued or cancelled."""


@contextlib.contextmanager
def private_cluster(
    directory: Path, *shared: Path, cpu_nodes: int = 2, gpu_nodes: int = 2
) -> Iterator[NamespacedSlurm]:
    """Gone when the block, or this process, ends. ``shared``: paths that all nodes see, besides ``directory``, this
    Python and this package. RunError if it cannot be here, saying why."""
    if reason := missing("namespaced"):
        raise RunError(f"no private Slurm cluster with namespaced nodes: {reason}")
    package = Path(prorl_hpc.__file__).parents[1]
    paths = {directory, package, Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), *shared}
    command = [sys.executable, "-m", "prorl_hpc", "dev", "cluster", "start", str(directory / "slurm")]
    command += ["--kind", "namespaced", "--until-eof", "--cpu-nodes", str(cpu_nodes)]
    command += ["--gpu-nodes", str(gpu_nodes)]
    command += ["--kill-wait", str(KILL_WAIT_S), *(word for path in sorted(paths) for word in ("--share", str(path)))]
    # A session of its own: at a terminal's Ctrl-C the cluster stays until the block has ended what runs on it.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leash:
        assert leash.stdin is not None and leash.stdout is not None and leash.stderr is not None
        try:
            if not leash.stdout.readline().startswith("up in"):
                raise RunError(f"the private Slurm cluster did not start: {leash.stderr.read().strip()}")
            cluster = open_cluster(directory / "slurm")
            assert isinstance(cluster, NamespacedSlurm)
            yield cluster
        finally:
            leash.stdin.close()
            leash.wait()


class ClusterRun:
    """One run as a job of the cluster. ``modules``: role → module that stands in for the real process."""

    def __init__(self, cluster: NamespacedSlurm, config: ProrlConfig, modules: dict[str, str]) -> None:
        self._cluster = cluster
        self.run = RunDirectory.create(config)
        RunKeys.create(self.run.keys)
        words = [f"{role}={module}" for role, module in modules.items()]
        self.job_id = self._ask(sys.executable, "-m", "prorl_hpc.bench.submit_run", str(self.run.path), *words).strip()

    def attempt(self, number: int) -> RunDirectory:
        return RunDirectory(self.run.path, number)

    def requeue(self) -> None:
        """As an admin would, from outside."""
        self._ask("scontrol", "requeue", self.job_id)

    def set_time_limit(self, minutes: int) -> None:
        """Of all components, counted from the start of the attempt."""
        self._ask("scontrol", "update", f"JobId={self.job_id}", f"TimeLimit={minutes}")

    def cancel(self) -> None:
        self._ask("scancel", self.job_id)

    @property
    def over(self) -> bool:
        """Slurm has ended the job, and does not start it again."""
        return not self._ask("squeue", "-h", "-j", self.job_id, "-o", "%T").strip()

    def wait(self, what: str, reached: Callable[[], bool], timeout_s: float, look_s: float = _LOOK_S) -> None:
        """Until ``reached``. RunError with the run's failure, if it has one, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if (failure := read_failure(self.run)) is not None:
                raise RunError(f"the run failed while the bench waited for {what}: {failure}")
            if time.monotonic() > deadline:
                raise RunError(f"{what} did not come within {timeout_s:.0f} s: see {self.run.logs}")
            time.sleep(look_s)

    def _ask(self, *words: str) -> str:
        done = self._cluster.run([*words], _CALL_S)
        if done.returncode != 0:
            raise RunError(f"{words[0]} failed on the private cluster: {(done.stderr or done.stdout).strip()}")
        return done.stdout
