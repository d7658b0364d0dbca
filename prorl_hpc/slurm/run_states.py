"""Where runs stand, many at a time: from their files alone where these are certain, and one call to Slurm for the rest."""

from __future__ import annotations

import dataclasses
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
from prorl_hpc.slurm.traces import storage_hint

T = TypeVar("T")

NOT_SUBMITTED = "not submitted"
WAITING, RUNNING, DRAINING, SUSPENDED = "waiting", "running", "draining", "suspended"
FINISHED, FAILED, STOPPED, ENDED, UNKNOWN = "finished", "failed", "stopped", "ended", "unknown"
LIVING = (WAITING, RUNNING, DRAINING, SUSPENDED)


@dataclass(frozen=True)
class RunState:
    """``word``: one of the constants above. waiting: in the queue for the first time; draining: told to stop, still
    ending; suspended: between two attempts: the job waits in the queue, or, if ``over``, is gone, and only resume goes
    on; ended: over without a word; unknown: Slurm does not answer, or the run is another machine's. ``detail``: why, for
    people. ``job_state``: Slurm's own word."""

    word: str
    detail: str = ""
    job: Job | None = None
    job_state: str = ""
    report: JobReport | None = None
    attempt: int = 1
    ending: AttemptEnding | None = None
    over: bool = False

    @property
    def living(self) -> bool:
        """It has a job that runs or will run, or may have one."""
        return (self.word in LIVING and not self.over) or self.word == UNKNOWN


def run_state(run: RunDirectory) -> RunState:
    return run_states([run])[0]


def run_states(runs: Sequence[RunDirectory]) -> list[RunState]:
    """In the order of ``runs``; at most one squeue, and for jobs that it has forgotten one sacct. What is over for good
    is not asked for."""
    looks = [_Look.at(run) for run in runs]
    asked = job_reports([look.job_id for look in looks if isinstance(look, _Look) and look.asks_slurm])
    return [look.told(asked) if isinstance(look, _Look) else look for look in looks]


class _Look:
    """What one run's files say at this moment. An ending, an order or a failure that does not read is taken as not there:
    this is for display. Which attempt is the newest and which job carries it must be known."""

    @classmethod
    def at(cls, run: RunDirectory) -> _Look | RunState:
        """UNKNOWN, with what is wrong, for a run whose files are damaged: the others are to be shown."""
        try:
            return cls(run)
        except _DAMAGE as error:
            return _damaged(error)

    def told(self, asked: JobReports) -> RunState:
        try:
            return self.state(asked)
        except _DAMAGE as error:
            return _damaged(error)

    def __init__(self, run: RunDirectory) -> None:
        self._run = RunDirectory(run.path, run.newest_attempt)
        self._job = _job_of(run)
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
        report = self._job.report_in(asked)
        if report is None:
            return self._as(UNKNOWN, asked.why_unknown(self._job.record.cluster))
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
        gone = self._how_it_went(report)
        suspended = self._ending or order
        if suspended is not None:  # its job was ended while it left off or waited, or nobody put it back
            told = f"{suspended.reason}; {gone}; `prorl-hpc resume` goes on"
            return dataclasses.replace(self._as(SUSPENDED, told, report), over=True)
        if report.state == "CANCELLED":
            return self._as(STOPPED, gone, report)
        told = gone if report.state == "ENDED" else f"{gone} without a word"
        hint = storage_hint(self._run, self._job) if self._job is not None else ""
        return self._as(ENDED, f"{told}; {hint}" if hint else told, report)

    def _how_it_went(self, report: JobReport) -> str:
        who = f"job {self.job_id}" if self.asks_slurm else f"its process {self.job_id}"
        if report.state == "CANCELLED":
            return f"{who} was cancelled"
        return f"{who} is gone" if report.state in (GONE, "ENDED") else f"{who} ended as {report.state}"

    def _has_run(self) -> bool:
        """The attempt has begun, so that a job which waits was put back."""
        return self._ending is not None or self._run.attempt > self._first_attempt() or any(self._run.state.iterdir())

    def _first_attempt(self) -> int:
        return self._job.record.attempt if self._job else 1

    def _as(self, word: str, detail: str, report: JobReport | None = None) -> RunState:
        state = report.state if report is not None else ""
        return RunState(word, detail, self._job, state, report, self._run.attempt, self._ending)


_DAMAGE = (OSError, ValueError, msgspec.MsgspecError, RunError)


def _damaged(error: Exception) -> RunState:
    return RunState(UNKNOWN, f"its files are damaged: {error}")


def _job_of(run: RunDirectory) -> Job | None:
    """Raises ValueError for a record that names no job: squeue refuses all that it is asked for one that is no number."""
    job = Job.open(run)
    if job is not None and not (job.record.job_id.isdecimal() and int(job.record.job_id) < _HIGHEST_ID):
        raise ValueError(f"jobs/job.json names {job.record.job_id!r} as its {job.record.kind} job")
    return job


_HIGHEST_ID = 2**32
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
