"""Whether the launcher of a job is still there, as the other nodes see it.

With --no-kill Slurm takes a lost node out of the job and lets the rest run, even if that node was the one with the batch
step: then nobody is left who could end the attempt. So the launcher shows that it lives, in ``state/launcher``; when it
does not for a while, the supervisors ask Slurm whether its node is still part of the job.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Collection

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.endings import Ending, lost_mark, read_node_end
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.requeueing import conclude_job
from prorl_hpc.slurm.steps import PlacedNode, host_names

log = logging.getLogger(__name__)
BEAT_S = 1.0
ANSWER_S = 20.0
OTHERS_MARGIN_S = 10.0
"""For the other nodes, beyond the time that their processes have to stop."""


class LauncherBeat:
    """The launcher's side: ``beat`` as often as you like."""

    def __init__(self, run: RunDirectory) -> None:
        self._file = run.state / "launcher"
        self._last = float("-inf")

    def beat(self) -> None:
        """Raises nothing: a full disk is told by those who must write."""
        if time.monotonic() - self._last < BEAT_S:
            return
        self._last = time.monotonic()
        try:
            self._file.touch()
        except OSError as error:
            log.warning("%s cannot be touched: %s", self._file, error)


class LauncherWatch:
    """The supervisors' side. ``silent_s``: after so long without a beat Slurm is asked, again and again."""

    def __init__(
        self,
        run: RunDirectory,
        silent_s: float,
        nodes_of_job: Callable[[str], Collection[str]] | None = None,
    ) -> None:
        self._run, self._silent_s = run, silent_s
        self._nodes_of_job = nodes_of_job or hosts_in_job
        self._seen = 0.0
        self._since = time.monotonic()

    def lost(self) -> PlacedNode | None:
        """The launcher's node, if Slurm has taken it out of the job. Asks Slurm at most every ``silent_s``."""
        try:
            beat = os.stat(self._run.state / "launcher").st_mtime  # noqa: PTH116
        except OSError:
            beat = self._seen
        now = time.monotonic()
        if beat != self._seen:
            self._seen, self._since = beat, now
        if now - self._since < self._silent_s:
            return None
        self._since = now
        placed = read_json(self._run.placement_file, list[PlacedNode])
        if not placed:
            return None
        log.warning("no sign of life of the launcher on %s for %.0f s", placed[0].host, self._silent_s)
        present = self._nodes_of_job(placed[0].job_id)
        return placed[0] if present and placed[0].host not in present else None


def hosts_in_job(job_id: str) -> set[str]:
    """All nodes that Slurm counts to the job; empty if it does not answer."""
    try:
        command = ["squeue", "-h", "-t", "running", "-j", job_id, "-o", "%N"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        return {host for line in done.stdout.split() for host in host_names(line)}
    except (OSError, subprocess.SubprocessError, RunError) as error:
        log.warning("Slurm does not tell the nodes of job %s: %s", job_id, error)
        return set()


def end_in_its_place(run: RunDirectory, plan: Plan, config: ProrlConfig, launcher: PlacedNode, reason: str) -> None:
    """Conclude the attempt, once the nodes that are left have ended, and put the job back into the queue."""
    hosts = {node.rank: node.host for node in read_json(run.placement_file, list[PlacedNode]) or []}
    left = {rank for rank, host in hosts.items() if host != launcher.host}
    deadline = time.monotonic() + config.run.stop_timeout_s + OTHERS_MARGIN_S
    while time.monotonic() < deadline and any(not _over(run, rank) for rank in left):
        time.sleep(0.25)
    conclude_job(run, plan, launcher.job_id, Ending.SUSPENDED, reason, [launcher.host], wanted=config.cluster.requeue)


def _over(run: RunDirectory, rank: int) -> bool:
    return read_node_end(run, rank) is not None or lost_mark(run, rank).exists()
