"""The job that carries a run: what is kept of it in ``jobs/job.json``, whether it lives, how to end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.process_identity import Life, ProcessIdentity, start_ticks
from prorl_hpc.slurm.states import ASK_TIMEOUT_S, GONE, JobPhase, JobReport, JobReports, UnknownLimit, job_reports

STATES_EVERY_S = 2.0
"""The controller is asked at most this often."""


class JobRecord(msgspec.Struct, frozen=True):
    """``job_id`` is Slurm's (the leader's of a heterogeneous job), or a process id on ``host``, which
    ``started_ticks`` and ``process`` tell from another process with the same number. ``attempt``: the first one that it
    carries. ``cluster``: Slurm's ClusterName. ``directory``: the run's, for a copy of it has no job. Records of earlier
    versions lack the last three."""

    kind: str
    job_id: str
    host: str
    started_ticks: int
    submitted: float
    attempt: int = 1
    cluster: str = ""
    directory: str = ""
    process: ProcessIdentity | None = None
    enclosing: str = ""
    """The Slurm job in whose allocation a local run was started; empty if in none."""


class Job:
    """A submitted job; any process that sees the run directory can open it."""

    def __init__(self, record: JobRecord, name: str = "", *, of_copy: bool = False) -> None:
        """``name``: what Slurm calls the job. ``of_copy``: the record is that of another run, whose directory was copied."""
        self.record, self.name, self._of_copy = record, name, of_copy
        self._asked = float("-inf")
        self._state = "PENDING"
        self._unknown = UnknownLimit(record.job_id)

    @classmethod
    def submitted(cls, run: RunDirectory, kind: str, job_id: str, attempt: int = 1, cluster: str = "") -> Job:
        """Write down a job that was just submitted; it is cancelled if that fails."""
        process = ProcessIdentity.of(int(job_id)) if kind == "local" else None
        ticks = process.started if process is not None else 0
        known = process if ticks else None  # else it is gone already
        host, now = socket.gethostname(), time.time()
        enclosing = os.environ.get("SLURM_JOB_ID", "") if kind == "local" else ""
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "") if enclosing else cluster
        record = JobRecord(kind, job_id, host, ticks, now, attempt, cluster, str(run.path), known, enclosing)
        job = cls(record, job_name(run))
        try:
            write_json(_job_file(run), record)
        except OSError as error:
            job.cancel()
            raise RunError(f"{_job_file(run)} cannot be written: {error}. {job.description} was cancelled") from error
        return job

    @classmethod
    def open(cls, run: RunDirectory) -> Job | None:
        """The newest job of ``run``; None if it was never submitted. Raises RunError if its record is damaged."""
        try:
            record = read_json(_job_file(run), JobRecord)
        except (msgspec.MsgspecError, OSError) as error:
            raise RunError(
                f"{_job_file(run)} cannot be read ({error}), so that it is not known which job {run.run_id} has: look with "
                f"`squeue --me --name {job_name(run)}`; if there is none, remove that file"
            ) from error
        if record is None:
            return None
        return cls(record, job_name(run), of_copy=_is_copy(run, record))

    @property
    def description(self) -> str:
        """For people: ``Slurm job 17`` or ``process 4711 on node3``."""
        if self.record.kind == "slurm":
            return f"Slurm job {self.record.job_id}"
        inside = f", in Slurm job {self.record.enclosing}" if self.record.enclosing else ""
        return f"process {self.record.job_id} on {self.record.host}{inside}"

    def state(self, *, now: bool = False) -> str:
        """Slurm's word for it (RUNNING, CANCELLED, …), cached for STATES_EVERY_S unless ``now``; a local job is
        RUNNING or ENDED. Raises RunError if nobody has known the job for a while, or it is on another host."""
        if self.record.kind == "local":
            return "RUNNING" if self._local_alive() else "ENDED"
        if now or time.monotonic() - self._asked >= STATES_EVERY_S:
            report = self.report_in(job_reports([self.record.job_id]))
            self._state = self._unknown.check(report.state if report is not None else None)
            self._asked = time.monotonic()
        return self._state

    def report_in(self, asked: JobReports) -> JobReport | None:
        """What ``asked`` says of it, and not of another job that has its id; None: it is not known whether it lives."""
        if self._of_copy:
            return JobReport(GONE)
        return asked.of(self.record.job_id, self.name, self.record.cluster)

    @property
    def ids(self) -> tuple[str, ...]:
        """By which a person may name it."""
        return tuple(filter(None, (self.record.job_id, self.record.enclosing)))

    def alive(self) -> bool:
        """Waiting, running, or still ending."""
        return JobPhase.of(self.state()) is not JobPhase.ENDED

    def waiting(self) -> bool:
        """In Slurm's queue."""
        return JobPhase.of(self.state()) is JobPhase.WAITING

    def cancel(self) -> None:
        """Ask the job to end: SIGTERM to every supervisor. Returns at once. Does nothing if it is gone; raises RunError if
        that is not known."""
        if self.record.kind == "slurm":
            asked = job_reports([self.record.job_id])
            report = self.report_in(asked)
            if report is None:
                raise RunError(f"{self.description} cannot be cancelled: {asked.why_unknown(self.record.cluster)}")
            if report.phase is JobPhase.ENDED:
                return
            done = subprocess.run(["scancel", self.record.job_id], capture_output=True, text=True)
            if done.returncode != 0 and "Invalid job id" not in done.stderr:
                raise RunError(f"scancel {self.record.job_id} failed: {done.stderr.strip()}")
        elif self.is_inside_another_job():
            raise RunError(
                f"{self.description} can be killed only there: it runs in Slurm job {self.record.enclosing}, which `scancel "
                f"{self.record.enclosing}` ends as a whole"
            )
        elif self._local_alive():
            os.kill(int(self.record.job_id), signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job is gone; False if it is not after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.state(now=True) and self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def is_inside_another_job(self) -> bool:
        """A local run in the allocation of a Slurm job, seen from outside of the node that it was started on."""
        return bool(self.record.enclosing) and not self._is_here()

    def _is_here(self) -> bool:
        if self.record.process is not None:
            return self.record.process.life() is not Life.UNKNOWN
        return self.record.host == socket.gethostname()

    def _alive_inside(self) -> bool:
        """As the job around it, until the newest attempt says that it has ended: the job may have more to do."""
        run = RunDirectory(self.record.directory)
        if RunDirectory(run.path, run.newest_attempt).ending_file.exists():
            return False
        if time.monotonic() - self._asked >= STATES_EVERY_S:
            asked = job_reports([self.record.enclosing])
            report = asked.of(self.record.enclosing, cluster=self.record.cluster)
            if report is None:
                why = asked.why_unknown(self.record.cluster)
                raise RunError(f"{self.description} cannot be looked for: {why}")
            self._state, self._asked = report.state, time.monotonic()
        return JobPhase.of(self._state) is not JobPhase.ENDED

    def _local_alive(self) -> bool:
        if self._of_copy:
            return False
        if self.is_inside_another_job():
            return self._alive_inside()
        if self.record.process is not None:
            life = self.record.process.life()
            if life is Life.UNKNOWN:
                raise RunError(self.record.process.why_unknown())
            return life is Life.ALIVE
        if self.record.host != socket.gethostname():
            raise RunError(
                f"this run was started on {self.record.host}, as its process {self.record.job_id}; "
                f"this is {socket.gethostname()}: run the command there"
            )
        ticks = start_ticks(int(self.record.job_id))
        return ticks is not None and ticks == self.record.started_ticks


def job_name(run: RunDirectory) -> str:
    """What Slurm calls the job of ``run``."""
    return f"prorl-{run.run_id}"


def strange_jobs(run: RunDirectory, job: Job | None) -> list[str]:
    """This user's jobs in the queue that may be this run's, though its record says otherwise, for people: of its name, but
    not its ``job``; or with the id of that, but renamed. Raises RunError if Slurm does not answer."""
    command = ["squeue", "-h", "-u", str(os.geteuid()), "-o", "%i|%j"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    if done.returncode != 0:
        raise RunError(f"it is not known whether {run.run_id} has another job: squeue failed: {done.stderr.strip()}")
    own = job.record.job_id if job is not None else ""
    rows = (line.strip().partition("|") for line in done.stdout.splitlines())
    named = [(words.partition("+")[0], name) for words, _, name in rows if words.partition("+")[2] in ("", "0")]
    return [f"{job_id} ({name})" for job_id, name in named if (job_id == own) != (name == job_name(run))]


def _job_file(run: RunDirectory) -> Path:
    return run.jobs / "job.json"


def _is_copy(run: RunDirectory, record: JobRecord) -> bool:
    """Its record names another directory, which is still there: a directory that was moved keeps its job."""
    original = Path(record.directory or run.path)
    return original.is_dir() and not original.samefile(run.path)
