"""A submitted run as ``launch``, ``serve`` and ``resume`` show it: until it ends, or until the view is left.

Ctrl-C ends the run. So does, on one machine, whatever else ends the view. A Slurm job needs no view: SIGTERM, a closed
terminal and a closed output, which come from a login node's rules as often as from a person, leave it alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from prorl_hpc.cli.stopping import Stopping
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.endings import Ending, StopOrder
from prorl_hpc.slurm.job import Job

STOP_LIMIT_S = 10.0
"""From Ctrl-C until nothing of the run is left."""
CANCEL_S = 2.0
"""Of that, for the job's cancellation, where it has not ended by itself."""
QUEUE_EVERY_S = 10.0
"""How often Slurm is asked why a job waits."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a view."""


@dataclass(frozen=True)
class View:
    """How a view ended. ``interrupted``: with the run, that it stopped; ``left``: without it, by which exit code."""

    interrupted: bool = False
    left: int = 0


class _Signalled(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


def follow_to_the_end(run: RunDirectory, config: ProrlConfig, job: Job) -> View:
    """Show the run until its job is gone, or until something ends the view."""
    from prorl_hpc.observe.progress import follow

    came = signal.SIGINT
    with _signals_interrupt():
        try:
            follow(run, job.alive, waits_for=QueueReason(run, job))
            job.wait(config.run.stop_timeout_s + 30.0)
            return View()
        except _Signalled as signalled:
            came = signalled.number
        except KeyboardInterrupt:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # nobody reads it; the terminal is gone
                raise
            came = signal.SIGPIPE
            _write_nowhere()
    return end_view(run, job, came)


def end_view(run: RunDirectory, job: Job, came: signal.Signals) -> View:
    """What ``came`` (SIGPIPE: a closed output) means for the run: it is stopped, or left alone."""
    ignore_signals()
    if came is not signal.SIGINT and job.record.kind == "slurm":
        return _leave(run, job, came)
    stop_at_once(run, job, f"{_CAME[came]} in launch" if came in _CAME else "the output of launch was closed")
    return View(interrupted=True)


_CAME = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def _leave(run: RunDirectory, job: Job, came: signal.Signals) -> View:
    with contextlib.suppress(OSError):  # it is left, told or not
        print(
            f"\n{_CAME.get(came, 'closed output')}: only this view ends, {job.description} goes on.\n"
            f"look: prorl-hpc status {run.path}\nstop: prorl-hpc stop {run.path}",
            file=sys.stderr,
            flush=True,
        )
    return View(left=128 + came)


def stop_at_once(run: RunDirectory, job: Job, reason: str) -> bool:
    """End the run without waiting for its rollouts, within STOP_LIMIT_S; True if all is gone."""
    with contextlib.suppress(OSError):  # the run must end, told or not
        print(f"\nstopping {run.run_id} …", flush=True)
    stopping = Stopping(run, job, StopOrder(Ending.STOPPED, reason))
    if stopping.wait(STOP_LIMIT_S - CANCEL_S, CANCEL_S, shown=False):
        return True
    print(f"{job.description} is still ending: `prorl-hpc status {run.path}` tells when it is gone", file=sys.stderr)
    return False


class QueueReason:
    """Why the job waits in Slurm's queue and when it is expected to start, for people; empty while it does not wait."""

    def __init__(self, run: RunDirectory, job: Job) -> None:
        self._run, self._job = run, job
        self._told, self._asked = "", float("-inf")

    def __call__(self) -> str:
        from prorl_hpc.slurm.run_states import SUSPENDED, WAITING, run_state

        if self._job.record.kind != "slurm" or not self._job.waiting():
            return ""
        if time.monotonic() - self._asked >= QUEUE_EVERY_S:
            with contextlib.suppress(RunError):  # it is asked again, and whether the job lives is others' question
                state = run_state(self._run)
                why = f": {state.detail}" if state.detail and state.word in (WAITING, SUSPENDED) else ""
                self._told = f"{self._job.description} waits in the queue{why}"
            self._asked = time.monotonic()
        return self._told


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end the view, unless they are ignored (nohup)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Signalled(number)

    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """While stopping: it is bounded, and a second Ctrl-C would leave things behind."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _write_nowhere() -> None:
    """For what is still to be said: a closed output would fail again at this process's exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
