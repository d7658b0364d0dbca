"""Job states from Slurm, with and without accounting: squeue, then sacct, then a bounded and loud "unknown".

One call answers for all jobs, whatever their number.
"""

from __future__ import annotations

import enum
import subprocess
import time

from prorl_hpc.messages.errors import RunError

UNKNOWN_LIMIT_S = 60.0
"""How long a job may be unknown to squeue and sacct (a restarting controller) before it is an error."""

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_LIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "UNKNOWN")
_WORST_FIRST = ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "PREEMPTED", "FAILED", "CANCELLED")


class JobPhase(enum.Enum):
    WAITING = "waiting"
    LIVE = "live"
    ENDED = "ended"

    @classmethod
    def of(cls, state: str) -> JobPhase:
        """The phase that Slurm's (or a local job's) ``state`` means."""
        if state in _WAITING:
            return cls.WAITING
        return cls.LIVE if state in _LIVE else cls.ENDED


def job_states(job_ids: list[str]) -> dict[str, str]:
    """State of each job that Slurm knows, by id. A heterogeneous job has the state of its liveliest
    component, or, when all have ended, the worst one."""
    if not job_ids:
        return {}
    # squeue answers for ended jobs too, for MinJobAge seconds, and needs no database
    rows = _ask(["squeue", "-h", "-t", "all", "-o", "%i|%T", "-j", ",".join(sorted(job_ids))])
    left = sorted(set(job_ids) - set(rows))
    if left:
        rows |= _ask(["sacct", "-n", "-X", "--parsable2", "-o", "JobID,State", "-j", ",".join(left)])
    return {job_id: worst(states) for job_id, states in rows.items()}


def worst(states: list[str]) -> str:
    """One word for the components of a job."""
    for state in (*_LIVE, *_WAITING, *_WORST_FIRST):
        if state in states:
            return state
    return states[0]


def _ask(command: list[str]) -> dict[str, list[str]]:
    """Components' states by job id; empty if Slurm does not answer (the caller bounds how long that may last)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        job_id, _, state = line.partition("|")
        if state:  # sacct says "CANCELLED by 1000"
            found.setdefault(job_id.split("+")[0].split(".")[0], []).append(state.split()[0])
    return found


class UnknownLimit:
    """Lets a job be unknown for UNKNOWN_LIMIT_S, then raises."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._last = "UNKNOWN"
        self._since: float | None = None

    def check(self, state: str | None) -> str:
        """The state to believe: ``state``, or the last one known while it is missing."""
        if state is not None:
            self._since, self._last = None, state
            return state
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > UNKNOWN_LIMIT_S:
            raise RunError(
                f"neither squeue nor sacct has known job {self._job_id} for {UNKNOWN_LIMIT_S:.0f} s (last state: "
                f"{self._last}): it is unknown whether it still runs. Look with `squeue --me` and `scontrol show job "
                f"{self._job_id}`"
            )
        return self._last
