"""One point of a series while its run is under way, and what became of it."""

from __future__ import annotations

import time

from prorl_hpc.bench.figures import commit_of_run
from prorl_hpc.bench.point_measures import measure
from prorl_hpc.bench.scaling_records import (
    RECORD_FILE,
    PointFigures,
    PointResult,
    PointSpec,
    PointState,
    read_record,
)
from prorl_hpc.bench.series_launch import engine_words, workload_words
from prorl_hpc.cli.following import QueueReason, stop_at_once
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.rollout import Status
from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.plain_lines import heartbeat
from prorl_hpc.observe.snapshot import SnapshotReader
from prorl_hpc.slurm.endings import OUT_OF_TIME, read_ending
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job

TOLD_EVERY_S = 15.0


class RunningPoint:
    """Raises RunError if the run has no job."""

    def __init__(self, spec: PointSpec, run: RunDirectory) -> None:
        job = Job.open(run)
        if job is None:
            raise RunError(f"{run.path} has no job: it was never submitted")
        self.spec, self.run, self.job = spec, run, job
        self._queue = QueueReason(run, job)
        self._told, self._told_at = "", time.monotonic()
        self._timed_out = False

    def over(self) -> bool:
        """The job is gone. One on this machine is ended at its time limit, as Slurm does it."""
        limit_s = self.spec.time_minutes * 60.0
        if self.job.record.kind == "local" and time.time() - self.job.record.submitted > limit_s and self.job.alive():
            self._timed_out = not self.run.finished_marker.exists()
            self.stop(f"the point's {self.spec.time_minutes} minutes are over")
        return not self.job.alive()

    def stop(self, reason: str) -> None:
        stop_at_once(self.run, self.job, reason)

    def news(self) -> str:
        """What it does, every so often; that it waits in a queue, which takes hours, once for each reason."""
        if time.monotonic() - self._told_at < TOLD_EVERY_S:
            return ""
        self._told_at = time.monotonic()
        waits = self._queue()
        if waits and waits == self._told:
            return ""
        self._told = waits
        return f"{self.spec.name}: {waits or self._progress()}"

    def _progress(self) -> str:
        snapshot = SnapshotReader(self.run).read()
        status = snapshot.run
        if status is None or any(process.phase is Phase.STARTING for process in snapshot.processes):
            return heartbeat(snapshot)
        ended = sum(status.rollouts.get(state.value, 0) for state in Status if state.terminal)
        broken = ended - status.rollouts.get(Status.DONE.value, 0) - status.rollouts.get(Status.CANCELLED.value, 0)
        of = f" of {self.spec.load.rollouts}" if self.spec.load.rollouts else ""
        return f"{ended}{of} rollouts ended" + (f", {broken} of them failed or timed out" if broken else "")

    def result(self) -> PointResult:
        """Of a run whose job is gone."""
        config = self.run.load_config()
        state, why, figures = self._outcome()
        date = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.job.record.submitted))
        workload = workload_words(config, self.spec.overrides)
        engine, commit = engine_words(config), commit_of_run(self.run.path)
        return PointResult(self.spec, state, why, str(self.run.path), engine, workload, date, figures, commit)

    def _outcome(self) -> tuple[PointState, str, PointFigures | None]:
        if self._out_of_time():
            return PointState.TIMED_OUT, self._time_words(), None
        if (failure := read_failure(self.run)) is not None:
            return PointState.FAILED, str(failure), None
        if not self.run.finished_marker.exists():
            ending = read_ending(self.run)
            how = f"was {ending.ending.value} ({ending.reason})" if ending is not None else "ended without a word"
            return PointState.FAILED, f"its run {how}; {self.job.description}; logs: {self.run.logs}", None
        try:
            record = read_record(self.run.path)
            if record is None:
                return PointState.FAILED, f"the load process left no {RECORD_FILE}; logs: {self.run.logs}", None
            figures = measure(self.run, record, self.spec)
        except ProrlError as error:
            return PointState.FAILED, f"{error}; logs: {self.run.logs}", None
        if figures.done == 0:
            why = f"none of its {figures.not_done} rollouts came to its end; logs: {self.run.logs}"
            return PointState.FAILED, why, None
        return PointState.DONE, "", figures

    def _out_of_time(self) -> bool:
        if self.run.finished_marker.exists():
            return False
        ending = read_ending(self.run)
        cut = self.job.record.kind == "slurm" and self.job.state() == "TIMEOUT"
        return self._timed_out or cut or (ending is not None and ending.reason.startswith(OUT_OF_TIME))

    def _time_words(self) -> str:
        return (
            f"its {self.spec.time_minutes} minutes were over when {self._progress()}: give minutes= more or rollouts= fewer "
            f"in a series of its own, or look why it was slow: {self.run.logs}"
        )
