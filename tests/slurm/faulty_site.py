"""A private cluster of namespaced nodes on which things go wrong, and the jobs of runs on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from fakes.runs import fake_config, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.endings import AttemptEnding, Ending, read_ending
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm

T = TypeVar("T")
PATIENCE_S = 120.0
"""The machine may be busy; nothing takes a tenth of that on a quiet one, but what waits for Slurm's own limits."""


@dataclass
class SiteJob:
    """A submitted run. ``site`` is where it runs."""

    site: FaultySite
    run: RunDirectory
    job_id: str

    def attempt(self, number: int) -> RunDirectory:
        return RunDirectory(self.run.path, number)

    def state(self) -> str:
        """Slurm's word for the leader's component."""
        said = self.site.slurm("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T").split()
        return said[0] if said else "UNKNOWN"

    def until(self, what: str, reached: Callable[[], T]) -> T:
        """The first true answer of ``reached``; an assertion names ``what`` and shows the launcher's log."""
        deadline = time.monotonic() + PATIENCE_S
        while not (answer := reached()):
            assert time.monotonic() < deadline, f"{what} did not come to be:\n{self.story()}"
            time.sleep(0.1)
        return answer

    def until_ready(self, attempt: int = 1, names: list[str] | None = None) -> RunDirectory:
        """Until these processes of the attempt (default: all of the plan) are READY."""
        run = self.attempt(attempt)
        plan = json.loads(run.plan_file.read_text())
        nodes = [node for component in plan["components"] for node in component["nodes"]]
        wanted = names or [process["name"] for node in nodes for process in node["processes"]]

        def ready() -> bool:
            assert read_failure(run) is None, f"{read_failure(run)}\n{self.story()}"
            states = [read_json(run.process_state(name), ProcessState) for name in wanted]
            return all(state is not None and state.phase is Phase.READY for state in states)

        self.until(f"attempt {attempt} with {wanted}", ready)
        return run

    def until_state(self, *states: str) -> str:
        return self.until(f"job state {' or '.join(states)}", lambda: self.state() if self.state() in states else "")

    def until_ended(self, attempt: int = 1) -> AttemptEnding:
        return self.until(f"the end of attempt {attempt}", lambda: read_ending(self.attempt(attempt)))

    def until_finished(self, attempt: int) -> None:
        """Training is finished in that attempt, the job is over, and nothing is left of it."""
        self.until_state("COMPLETED")
        ended = read_ending(self.attempt(attempt))
        assert ended is not None, self.story()
        assert (ended.ending, ended.exit_code) == (Ending.FINISHED, 0), self.story()
        assert self.run.newest_attempt == attempt
        self.leaves_nothing()

    def leaves_nothing(self) -> None:
        """No process and no file on any node; clients on the login node may be there."""

        def processes() -> list[str]:
            return [line for line in processes_of(self.run) if "fakes.ordering" not in line]

        self.until(f"the end of all processes, of {processes()}", lambda: not processes())
        left = self.site.files_on_nodes()
        assert not left, f"{left}\n{self.story()}"

    def go(self, name: str = "go") -> None:
        """Tell fakes that wait for this file."""
        (self.run.path / name).touch()

    def host_of(self, name: str, attempt: int = 1) -> str:
        state = read_json(self.attempt(attempt).process_state(name), ProcessState)
        assert state is not None
        return state.node

    def pids(self, words: str) -> list[int]:
        """Processes of the run but for srun's, as the host numbers them, whose command line contains ``words``."""
        lines = [line for line in processes_of(self.run) if words in line and " srun " not in line]
        return [int(line.partition(":")[0]) for line in lines]

    def kill(self, words: str) -> None:
        """SIGKILL the one process of the run whose command line contains ``words``."""
        (pid,) = self.pids(words)
        os.kill(pid, signal.SIGKILL)

    def signal_launcher(self, number: signal.Signals) -> None:
        (pid,) = [
            process.pid
            for process in psutil.process_iter()
            if {"submitit.core._submit", str(self.run.jobs)} <= {*_command(process)}
        ]
        os.kill(pid, number)

    def story(self) -> str:
        """All that was said, for a test that failed."""
        attempts = list(self.run.attempts.glob("[0-9]*"))
        files = [log for attempt in sorted(attempts) for log in (attempt / "logs").glob("*.log")]
        files += [*self.run.jobs.glob("*.err"), *self.run.attempts.glob("*/ending.json")]
        parts = [f"--- {file.relative_to(self.run.path)}\n{file.read_text()[-3000:]}" for file in files]
        return "\n".join([self.site.slurm("scontrol", "show", "job", self.job_id), *parts, *processes_of(self.run)])


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class FaultySite:
    """``small``: a disk that all nodes share and that is full soon, as this host sees it."""

    def __init__(self, cluster: NamespacedSlurm) -> None:
        self.cluster = cluster
        (small,) = cluster.shape.share_tmpfs
        login = (cluster.directory / "run" / "login.init").read_text().strip()
        self._elsewhere = f"/proc/{login}/root"
        self.small = Path(f"{self._elsewhere}{small}")

    def config(self, workers: int = 2, servers: int = 1) -> ProrlConfig:
        """Of fakes, with short limits, in the cluster's shared directory: trainer and LLM servers need other nodes."""
        config = fake_config(self.cluster.shared, slurm=True)
        config.run.restarts = 1
        config.run.drain_s = 5.0
        config.rollout.lost_after_s, config.rollout.heartbeat_s = 3.0, 0.5
        config.cluster.rollout.nodes, config.cluster.inference.nodes = workers, servers
        config.cluster.signal_lead_s = 20.0
        return config

    def submit(self, config: ProrlConfig, acts: dict[str, dict[str, Any]], *words: str) -> SiteJob:
        return self.submit_again(fake_run(config, acts), *words)

    def submit_again(self, run: RunDirectory, *words: str) -> SiteJob:
        """The next attempt as a job of its own."""
        done = self.cluster.run([sys.executable, "-m", "fakes.submitting", self.there(run), *words], PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return SiteJob(self, run, done.stdout.split()[-1])

    def there(self, run: RunDirectory) -> str:
        """The run directory's path on the nodes."""
        return str(run.path).removeprefix(self._elsewhere)

    @contextmanager
    def small_disk_full(self) -> Iterator[None]:
        """Not a byte is left on it meanwhile."""
        file = self.small / "filler"
        try:
            with file.open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            yield
        finally:
            file.unlink()

    def slurm(self, *words: str) -> str:
        """What a Slurm command says, on the login node."""
        done = self.cluster.run([*words], PATIENCE_S)
        return done.stdout + done.stderr

    @contextmanager
    def crashed(self, *nodes: str) -> Iterator[None]:
        """Without power meanwhile; afterwards they are in service again."""
        for node in nodes:
            self.cluster.crash(node)
        try:
            yield
        finally:
            for node in nodes:
                self.cluster.boot(node)

    def restored(self, node: str) -> None:
        """Until the controller hears of a node whose cable was cut; it would ask the node itself only after a while."""
        self.slurm("scontrol", "reconfigure")
        self.cluster.wait_in_service(node, PATIENCE_S)

    def files_on_nodes(self) -> list[str]:
        """What runs left on the nodes."""
        return [f"{node}: {path}" for node in self.cluster.shape.nodes for path in self._left_on(node)]

    def _left_on(self, node: str) -> list[str]:
        found = ["find", "/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1", "-name", "prorl-*"]
        return self.cluster.run(found, node=node).stdout.split()

    def clean(self) -> None:
        """After a test, however it went: no job, all nodes in service."""
        self.cluster.cancel_jobs(60.0)
        states = self.cluster.states()
        for node in self.cluster.shape.nodes:
            if not states.get(node, "").startswith(("idle", "mixed", "alloc", "comp")):
                self.slurm("scontrol", "update", f"nodename={node}", "state=resume")
            if left := self._left_on(node):
                self.cluster.run(["rm", "-r", *left], node=node)
        for path in self.small.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
