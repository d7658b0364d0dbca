"""How a person ends a run: the order that its supervisors see, what is shown meanwhile, and the job's cancellation
where the order does not reach: while it waits in the queue, between two attempts, or when it takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.status import Phase, RunStatus
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.observe.snapshot import SnapshotReader
from prorl_hpc.observe.wording import count
from prorl_hpc.slurm.endings import AttemptEnding, Ending, StopOrder, order_stop, read_ending, write_ending
from prorl_hpc.slurm.job import Job

POLL_S = 0.2
CANCEL_AGAIN_S = 5.0
"""scancel may come just between the end of an attempt and its return to the queue."""
GONE_S = 20.0
"""From the cancellation until nothing of the job is left: Slurm kills what has not ended after its KillWait."""
UNDER_WAY = ("init", "ready", "run", "ran", "eval")


class Stopping:
    """The end of one run, wanted by a person."""

    def __init__(self, run: RunDirectory, job: Job, order: StopOrder) -> None:
        self._run, self._job, self._order = run, job, order
        self._ordered = 0
        self._cancelled_at: float | None = None
        self._last = 0.0

    def wait(self, limit_s: float, gone_s: float = GONE_S, *, shown: bool = True) -> bool:
        """Until the job is gone. After ``limit_s`` it is cancelled; False if it is still there ``gone_s`` later."""
        progress = DrainProgress(self._run, self._order, shown, waiting=self._job.waiting)
        try:
            gone = self._wait(limit_s, gone_s, progress)
        finally:
            progress.close()
        if gone:
            self._record()
        return gone

    def _wait(self, limit_s: float, gone_s: float, progress: DrainProgress) -> bool:
        begun = time.monotonic()
        while self._job.alive():
            self._give_order()
            waited = time.monotonic() - begun
            if self._job.waiting() or waited > limit_s:
                self._cancel()
            if self._cancelled_at is not None and time.monotonic() - self._cancelled_at > gone_s:
                return False
            progress.show(waited)
            time.sleep(POLL_S)
        return True

    def _give_order(self) -> None:
        """To the newest attempt: one may have begun meanwhile. Where an attempt is ordered to end already, but would take
        longer, the signals of a cancellation hurry it."""
        newest = RunDirectory(self._run.path, self._run.newest_attempt)
        if newest.attempt == self._ordered:
            return
        self._ordered = newest.attempt
        standing = order_stop(newest, self._order)
        passed = time.time() - standing.time
        if standing.drain_s - passed > self._order.drain_s and not self._job.waiting():
            self._cancel()

    def _cancel(self) -> None:
        """Job.cancel, not more often than it takes to have an effect."""
        now = time.monotonic()
        if self._cancelled_at is None:
            self._job.cancel()
            self._cancelled_at = self._last = now
        elif self._job.waiting() and now - self._last > CANCEL_AGAIN_S:
            self._job.cancel()
            self._last = now

    def _record(self) -> None:
        """An attempt that could not say how it ended, or said that it goes on, was stopped."""
        newest = RunDirectory(self._run.path, self._run.newest_attempt)
        ending = read_ending(newest)
        if newest.finished_marker.exists() or newest.failure_file.exists():
            return
        if ending is None:
            ending = AttemptEnding(Ending.STOPPED, self._order.reason, time.time(), self._job.record.job_id)
        elif ending.ending is Ending.SUSPENDED:
            reason = f"{ending.reason}; then {self._order.reason}"
            ending = msgspec.structs.replace(ending, ending=Ending.STOPPED, reason=reason, goes_on=False)
        else:
            return
        write_ending(newest, ending)


class DrainProgress:
    """Says what a run that is told to stop still does: a line that is written over on a terminal, else a line where
    something changes, at most every few seconds."""

    EVERY_S = 5.0

    def __init__(
        self, run: RunDirectory, order: StopOrder, shown: bool, *, waiting: Callable[[], bool] = lambda: False
    ) -> None:
        from rich.console import Console

        self._run, self._order, self._shown, self._waiting = run, order, shown, waiting
        self._reader, self._console = SnapshotReader(run), Console()
        self._told, self._told_at = "", float("-inf")

    def show(self, waited_s: float) -> None:
        if not self._shown:
            return
        live = self._console.is_terminal
        text, now = self.text(waited_s), time.monotonic()
        if text == self._told or now - self._told_at < (POLL_S if live else self.EVERY_S):
            return
        self._told, self._told_at = text, now
        if live:
            print(f"\r\x1b[K{text[: self._console.width - 1]}", end="", flush=True)
        else:
            print(text, flush=True)

    def text(self, waited_s: float) -> str:
        """``draining: 12 rollouts under way, at most 18 s``, then who has not ended yet."""
        left_s = self._order.drain_s - waited_s
        status = read_tolerantly(self._run.status_file, RunStatus)
        if left_s > 0 and status is not None and not self._run.drained_marker.exists():
            flying = sum(status.rollouts.get(word, 0) for word in UNDER_WAY)
            return f"draining: {count(flying, 'rollout')} under way, at most {left_s:.0f} s"
        over = (Phase.ENDED, Phase.FAILED)
        left = [process.name for process in self._reader.read().processes if process.phase not in over]
        names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        if left:
            return f"ending: {names}"
        return "the job is being cancelled in the queue" if self._waiting() else "waiting until the job is gone"

    def close(self) -> None:
        if self._shown and self._console.is_terminal and self._told:
            print("\r\x1b[K", end="", flush=True)
