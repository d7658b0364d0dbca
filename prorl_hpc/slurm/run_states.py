"""Where runs stand, many at a time: from their files alone where these are certain, and one call to Slurm for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.endings import AttemptEnding, Ending, StopOrder, read_ending, read_stop
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.states import GONE, JobPhase, JobReport, JobReports, job_reports

T = TypeVar("T")

NOT_SUBMITTED = "not submitted"
WAITING, RUNNING, DRAINING, SUSPENDED = "waiting", "running", "draining", "suspended"
FINISHED, FAILED, STOPPED, ENDED, UNKNOWN = "finished", "failed", "stopped", "ended", "unknown"
LIVING = (WAITING, RUNNING, DRAINING, SUSPENDED)


@dataclass(frozen=True)
class RunState:
    """``word``: one of the constants above. waiting: in the queue for the first time; draining: told to stop, still
    ending; suspended: between two attempts, the job waits in the queue; ended: over without a word; unknown: Slurm does
    not answer, or the run is another machine's. ``detail``: why, for people. ``job_state``: Slurm's own word."""

    word: str
    detail: str = ""
    job: Job | None = None
    job_state: str = ""
    report: JobReport | None = None
    attempt: int = 1
    ending: AttemptEnding | None = None

    @property
    def living(self) -> bool:
        """It has a job that runs or will run, or may have one."""
        return self.word in LIVING or self.word == UNKNOWN


def run_state(run: RunDirectory) -> RunState:
    return run_states([run])[0]


def run_states(runs: Sequence[RunDirectory]) -> list[RunState]:
    """In the order of ``runs``; at most one squeue, and for jobs that it has forgotten one sacct. What is over for good
    is not asked for."""
    looks = [_Look(run) for run in runs]
    asked = job_reports([look.job_id for look in looks if look.asks_slurm])
    return [look.state(asked) for look in looks]


class _Look:
    """What one run's files say at this moment. Files that do not read are taken as not there: this is for display."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = RunDirectory(run.path, run.newest_attempt)
        self._job = Job.open(run)
        self._ending = _readable(read_ending, self._run)
        self.job_id = self._job.record.job_id if self._job else ""
        self._is_over = self._ending is not None and self._ending.ending is not Ending.SUSPENDED
        slurm = self._job is not None and self._job.record.kind == "slurm"
        # one that was suspended may be put back by Slurm itself
        self.asks_slurm = slurm and not self._is_over

    def state(self, asked: JobReports) -> RunState:
        if self._job is None:
            return self._as(NOT_SUBMITTED, "it has no job: launch was interrupted before it was submitted")
        if self._ending is not None and self._is_over:
            return self._as(_OVER[self._ending.ending], self._ending.reason)
        if not self.asks_slurm:
            return self._of_local_job()
        report = asked.of(self.job_id)
        if report is None:
            return self._as(UNKNOWN, asked.trouble)
        if report.phase is JobPhase.WAITING:
            return self._as(SUSPENDED if self._has_run() else WAITING, _waits_for(report), report)
        if report.phase is JobPhase.LIVE:
            return self._alive(report)
        return self._over(report)

    def _of_local_job(self) -> RunState:
        assert self._job is not None
        try:
            alive = self._job.alive()
        except RunError as error:
            return self._as(UNKNOWN, str(error))
        return self._alive(JobReport("RUNNING")) if alive else self._over(JobReport("ENDED"))

    def _alive(self, report: JobReport) -> RunState:
        order = _readable(read_stop, self._run) if self._ending is None else None
        if order is not None:
            return self._as(DRAINING, f"{order.reason} ({_DRAINED_TO.get(order.ending, 'stops')})", report)
        return self._as(RUNNING, "" if report.state == "RUNNING" else f"its job is {report.state}", report)

    def _over(self, report: JobReport) -> RunState:
        """No job, and no record of an end for good: cut off, or the job was ended while it waited to go on."""
        failure = _readable(read_failure, self._run)
        if failure is not None:
            return self._as(FAILED, f"{failure.name} on {failure.node} {failure.what}", report)
        if self._run.finished_marker.exists():
            return self._as(FINISHED, "", report)
        order: StopOrder | None = _readable(read_stop, self._run)
        if order is not None and order.ending is Ending.STOPPED:
            return self._as(STOPPED, order.reason, report)
        if self._ending is not None:  # suspended: its job was ended while it waited, or nobody put it back
            return self._as(STOPPED, self._ending.reason, report)
        if report.state == "CANCELLED":
            return self._as(STOPPED, f"job {self.job_id} was cancelled", report)
        how = "is gone" if report.state == GONE else f"ended as {report.state}"
        who = f"job {self.job_id}" if self.asks_slurm else f"its process {self.job_id}"
        return self._as(ENDED, f"{who} {how} without a word" if report.state != "ENDED" else f"{who} is gone", report)

    def _has_run(self) -> bool:
        """The attempt has begun, so that a job which waits was put back."""
        return self._ending is not None or self._run.attempt > self._first_attempt() or any(self._run.state.iterdir())

    def _first_attempt(self) -> int:
        return self._job.record.attempt if self._job else 1

    def _as(self, word: str, detail: str, report: JobReport | None = None) -> RunState:
        state = report.state if report is not None else ""
        return RunState(word, detail, self._job, state, report, self._run.attempt, self._ending)


_OVER = {
    Ending.FINISHED: FINISHED,
    Ending.FAILED: FAILED,
    Ending.STOPPED: STOPPED,
}
_DRAINED_TO: dict[Ending, str] = {Ending.STOPPED: "stops", Ending.SUSPENDED: "goes on later"}


def _waits_for(report: JobReport) -> str:
    told = [report.reason] if report.reason else []
    told += [f"expected to start {report.start.replace('T', ' ')}"] if report.start else []
    return ", ".join(told)


def _readable(read: Callable[[RunDirectory], T | None], run: RunDirectory) -> T | None:
    try:
        return read(run)
    except (OSError, msgspec.MsgspecError):
        return None
