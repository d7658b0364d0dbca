"""Job states from Slurm, with and without accounting: squeue, then sacct, then a bounded and loud "unknown".

One call answers for all jobs, whatever their number.
"""

from __future__ import annotations

import enum
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.cluster_name import this_cluster

UNKNOWN_LIMIT_S = 60.0
"""How long a job may be unknown to squeue and sacct (a restarting controller) before it is an error."""
ASK_TIMEOUT_S = 20.0

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_LIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "UNKNOWN")
_WORST_FIRST = ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "PREEMPTED", "FAILED", "CANCELLED")
_NOTHING = ("", "N/A", "NONE", "None", "UNLIMITED", "INVALID", "NOT_SET", "Unknown")
GONE = "GONE"
"""The controller answered and does not know the job any more, and accounting does not tell how it ended."""


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


@dataclass(frozen=True)
class JobReport:
    """What Slurm says of one job. ``reason``: why it waits, in Slurm's word; ``start``: when it began, or is expected
    to begin, as Slurm writes it (2026-01-31T12:00:00, local time); ``left_s``: time until its limit, seconds;
    ``name``: the job's own. Empty and None where Slurm does not say."""

    state: str
    reason: str = ""
    start: str = ""
    left_s: float | None = None
    name: str = ""

    @property
    def phase(self) -> JobPhase:
        return JobPhase.of(self.state)


@dataclass(frozen=True)
class JobReports:
    """``jobs``: those that Slurm knows, by id. ``trouble``: why the controller did not answer, or nothing: then what is
    missing in ``jobs`` does not live any more."""

    jobs: dict[str, JobReport] = field(default_factory=dict)
    trouble: str = ""

    def of(self, job_id: str, name: str = "", cluster: str = "") -> JobReport | None:
        """None: it is not known whether that job lives (why_unknown). ``name``: a job of another name is another job with
        the same id. ``cluster``: where it was submitted; the Slurm of another one cannot say that it is gone."""
        known = self.jobs.get(job_id)
        if known is not None and (not name or known.name in ("", name)):
            return known
        return None if self.why_unknown(cluster) else JobReport(GONE)

    def why_unknown(self, cluster: str = "") -> str:
        """For people: why it is not known whether a job lives that was submitted to ``cluster`` and is not in ``jobs``;
        empty if it is gone."""
        if self.trouble or not cluster:
            return self.trouble
        try:
            here = this_cluster()
        except RunError as error:
            return str(error)
        return (
            ""
            if here == cluster
            else f"its job is on the cluster {cluster}, and this machine's Slurm is {here}: ask there"
        )


def job_reports(job_ids: Collection[str]) -> JobReports:
    """One squeue for all of them; then, for those that it has forgotten, one sacct, which may fail."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return JobReports()
    # squeue answers for ended jobs too, for MinJobAge seconds, and needs no database
    rows, trouble = _ask(["squeue", "-h", "-t", "all", "-o", "%i|%T|%r|%S|%L|%j", "-j", ",".join(wanted)])
    if "Invalid job id" in trouble:  # a single job that it has forgotten
        trouble = ""
    left = sorted(set(wanted) - set(rows))
    if left:
        rows |= _ask(["sacct", "-n", "-X", "--parsable2", "-o", "JobID,State,JobName", "-j", ",".join(left)])[0]
    return JobReports({job_id: _joined(parts) for job_id, parts in rows.items() if job_id in wanted}, trouble)


def job_states(job_ids: list[str]) -> dict[str, str]:
    """State of each job that Slurm knows, by id. A heterogeneous job has the state of its liveliest
    component, or, when all have ended, the worst one."""
    return {job_id: report.state for job_id, report in job_reports(job_ids).jobs.items()}


def worst(states: list[str]) -> str:
    """One word for the components of a job."""
    for state in (*_LIVE, *_WAITING, *_WORST_FIRST):
        if state in states:
            return state
    return states[0]


def _joined(parts: list[JobReport]) -> JobReport:
    """A heterogeneous job from its components: the one that decides its state, and whichever ends first."""
    state = worst([part.state for part in parts])
    chosen = next(part for part in parts if part.state == state)
    left = [part.left_s for part in parts if part.left_s is not None]
    starts = sorted(part.start for part in parts if part.state == state and part.start)
    name = next((part.name for part in parts if part.name), "")
    return JobReport(state, chosen.reason, starts[-1] if starts else "", min(left, default=None), name)


def _ask(command: list[str]) -> tuple[dict[str, list[JobReport]], str]:
    """Components' reports by job id, and why there is no answer; the caller bounds how long that may last."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except FileNotFoundError:
        return {}, f"there is no {command[0]} on this machine's PATH"
    except subprocess.TimeoutExpired:
        return {}, f"{command[0]} did not answer within {ASK_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return {}, f"{command[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}"
    found: dict[str, list[JobReport]] = {}
    for line in done.stdout.splitlines():
        job_id, *fields = line.strip().split("|", 2 if command[0] == "sacct" else 5)
        if fields and fields[0]:  # sacct says "CANCELLED by 1000"
            told = ["", "", "", *fields[1:]] if command[0] == "sacct" else fields[1:]
            state, (reason, start, left, name, *_) = fields[0].split()[0], [*told, "", "", "", ""]
            leads = "+" not in job_id or job_id.endswith("+0")  # the other components may have any name
            report = JobReport(state, _said(reason), _said(start), _seconds(left), name if leads else "")
            found.setdefault(job_id.split("+")[0].split(".")[0], []).append(report)
    return found, ""


def _said(word: str) -> str:
    return "" if word in _NOTHING else word


def _seconds(word: str) -> float | None:
    """``1-02:03:04`` (days, hours, minutes, seconds; the first may be missing) in seconds."""
    if word in _NOTHING:
        return None
    days, _, clock = word.rpartition("-")
    try:
        total = float(int(days or 0) * 86400)
        for place, part in enumerate(reversed(clock.split(":"))):
            total += int(part) * 60.0**place
        return total
    except ValueError:
        return None


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
