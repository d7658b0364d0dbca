"""One attempt of a run as a person sees it: submitted, shown, perhaps interrupted, and how it ended."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from prorl_hpc.cli.stopping import Stopping
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.children import tail
from prorl_hpc.slurm.endings import Ending, StopOrder, read_ending, read_stop
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.run_index import register_run

STOP_LIMIT_S = 10.0
"""From Ctrl-C until nothing of the run is left."""
CANCEL_S = 2.0
"""Of that, for the job's cancellation, where it has not ended by itself."""


def run_attempt(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
    """Submit and, unless ``detach``, show the run until it ends; returns the exit code."""
    job = submit(run, config, plan)
    try:
        register_run(run)
    except OSError as error:  # it runs already, and can be named by its directory
        print(f"{run.run_id} could not be put into the index of your runs: {error}", file=sys.stderr)
    print(f"run {run.path}  ({job.description})", flush=True)
    if detach:
        print(f"look: prorl-hpc status {run.path}\nstop: prorl-hpc stop {run.path}")
        return 0
    interrupted = follow_to_the_end(run, config, job)
    return tell_ending(run, job, interrupted=interrupted)


def follow_to_the_end(run: RunDirectory, config: ProrlConfig, job: Job) -> bool:
    """Show the run until its job is gone. True if a signal came, or nobody reads what is shown any more: that stops
    the run in order."""
    from prorl_hpc.observe.progress import follow

    with _signals_interrupt():
        try:
            follow(run, job.alive)
            job.wait(config.run.stop_timeout_s + 30.0)
            return False
        except KeyboardInterrupt as signalled:
            reason = f"{str(signalled) or 'Ctrl-C'} in launch"
        except BrokenPipeError:
            reason = "the output of launch was closed"
    _ignore_signals()
    stop_at_once(run, job, reason)
    return True


def stop_at_once(run: RunDirectory, job: Job, reason: str) -> bool:
    """End the run without waiting for its rollouts, within STOP_LIMIT_S; True if all is gone."""
    with contextlib.suppress(BrokenPipeError):  # the run must end, told or not
        print(f"\nstopping {run.run_id} …", flush=True)
    stopping = Stopping(run, job, StopOrder(Ending.STOPPED, reason))
    if stopping.wait(STOP_LIMIT_S - CANCEL_S, CANCEL_S, shown=False):
        return True
    print(f"{job.description} is still ending: `prorl-hpc status {run.path}` tells when it is gone", file=sys.stderr)
    return False


def tell_ending(run: RunDirectory, job: Job, *, interrupted: bool) -> int:
    """Print how the run ended and what to do next; returns the exit code."""
    failure = read_failure(run)
    if failure is not None and not interrupted:
        print(f"\nThe run failed: {failure}", file=sys.stderr)
        _tell_what_is_left(run)
        return 1
    if run.finished_marker.exists():
        print("\n" + "\n".join(_success(run)))
        return 0
    if (how := _left_off(run)) is not None:
        print(f"\nThe run {how}.")
        _tell_what_is_left(run)
        return 130 if interrupted else 1
    print(f"\nThe run ended without a word of its own: {job.description} is {job.state(now=True)}.", file=sys.stderr)
    for file in sorted(run.jobs.glob("*.err")):
        for line in tail(file, 5):
            print(f"  {file.name} | {line}", file=sys.stderr)
    _tell_what_is_left(run)
    return 1


def _left_off(run: RunDirectory) -> str | None:
    """That it was stopped or suspended, and why; None if it says nothing of that."""
    ending = read_ending(run) or read_stop(run)
    if ending is None or ending.ending not in (Ending.STOPPED, Ending.SUSPENDED):
        return None
    word = "was stopped" if ending.ending is Ending.STOPPED else "was suspended, and its job does not go on by itself"
    return f"{word} ({ending.reason or 'no reason given'})"


def _tell_what_is_left(run: RunDirectory) -> None:
    from prorl_hpc.observe.run_figures import loadable_checkpoints

    checkpoints = loadable_checkpoints(run)
    print(f"checkpoint: {checkpoints[-1]}" if checkpoints else "checkpoint: none yet")
    print(f"logs:       {run.logs}")
    print(f"go on with: prorl-hpc resume {run.path}")


def _success(run: RunDirectory) -> Iterator[str]:
    from prorl_hpc.observe.run_figures import RunFigures

    figures = RunFigures.of(run)
    yield f"Training is finished: {len(figures.steps)} steps."
    if figures.evals:
        before, after = figures.evals[0], figures.evals[-1]
        yield f"held-out reward: {_reward(before)} before, {_reward(after)} after"
    if figures.breakages:
        worst = figures.breakages[0]
        place = f"in {worst.stage} " if worst.stage else ""
        yield (
            f"broken:     {sum(figures.failures.values())} of {sum(figures.status_counts.values())} rollouts; "
            f"{worst.count} {place}({worst.kind}): {worst.message}"
        )
    yield f"report:     {run.report_file}"
    if run.reward_plot.exists():
        yield f"curve:      {run.reward_plot}"
    if figures.checkpoints:
        yield f"checkpoint: {figures.checkpoints[-1]}"


def _reward(record: dict[str, object]) -> str:
    value = record.get("reward")
    return f"{value:.3f}" if isinstance(value, float | int) else "?"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal stop the run as Ctrl-C does, unless they are ignored (nohup)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """While stopping: it is bounded, and a second Ctrl-C would leave things behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
