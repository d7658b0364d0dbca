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
from prorl_hpc.slurm.states import JobPhase, UnknownLimit, job_reports

STATES_EVERY_S = 2.0
"""The controller is asked at most this often."""


class JobRecord(msgspec.Struct, frozen=True):
    """``job_id`` is Slurm's (the leader's of a heterogeneous job), or a process id on ``host``, which
    ``started_ticks`` tells from a later process with the same number. ``attempt``: the first one that it carries."""

    kind: str
    job_id: str
    host: str
    started_ticks: int
    submitted: float
    attempt: int = 1


class Job:
    """A submitted job; any process that sees the run directory can open it."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self._asked = float("-inf")
        self._state = "PENDING"
        self._unknown = UnknownLimit(record.job_id)

    @classmethod
    def submitted(cls, run: RunDirectory, kind: str, job_id: str, attempt: int = 1) -> Job:
        """Write down a job that was just submitted."""
        ticks = _start_ticks(int(job_id)) if kind == "local" else 0
        record = JobRecord(kind, job_id, socket.gethostname(), ticks or 0, time.time(), attempt)
        write_json(_job_file(run), record)
        return cls(record)

    @classmethod
    def open(cls, run: RunDirectory) -> Job | None:
        """The newest job of ``run``; None if it was never submitted."""
        record = read_json(_job_file(run), JobRecord)
        return None if record is None else cls(record)

    @property
    def description(self) -> str:
        """For people: ``Slurm job 17`` or ``process 4711 on node3``."""
        if self.record.kind == "slurm":
            return f"Slurm job {self.record.job_id}"
        return f"process {self.record.job_id} on {self.record.host}"

    def state(self, *, now: bool = False) -> str:
        """Slurm's word for it (RUNNING, CANCELLED, …), cached for STATES_EVERY_S unless ``now``; a local job is
        RUNNING or ENDED. Raises RunError if nobody has known the job for a while, or it is on another host."""
        if self.record.kind == "local":
            return "RUNNING" if self._local_alive() else "ENDED"
        if now or time.monotonic() - self._asked >= STATES_EVERY_S:
            report = job_reports([self.record.job_id]).of(self.record.job_id)
            self._state = self._unknown.check(report.state if report is not None else None)
            self._asked = time.monotonic()
        return self._state

    def alive(self) -> bool:
        """Waiting, running, or still ending."""
        return JobPhase.of(self.state()) is not JobPhase.ENDED

    def waiting(self) -> bool:
        """In Slurm's queue."""
        return JobPhase.of(self.state()) is JobPhase.WAITING

    def cancel(self) -> None:
        """Ask the job to end: SIGTERM to every supervisor. Returns at once."""
        if self.record.kind == "slurm":
            done = subprocess.run(["scancel", self.record.job_id], capture_output=True, text=True)
            if done.returncode != 0 and "Invalid job id" not in done.stderr:
                raise RunError(f"scancel {self.record.job_id} failed: {done.stderr.strip()}")
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

    def _local_alive(self) -> bool:
        if self.record.host != socket.gethostname():
            raise RunError(
                f"this run was started on {self.record.host}, as its process {self.record.job_id}; "
                f"this is {socket.gethostname()}: run the command there"
            )
        ticks = _start_ticks(int(self.record.job_id))
        return ticks is not None and ticks == self.record.started_ticks


def _job_file(run: RunDirectory) -> Path:
    return run.jobs / "job.json"


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
