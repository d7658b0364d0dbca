"""One attempt of a run as a person sees it: submitted, shown, perhaps interrupted, and how it ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType

from prorl_hpc.cli.following import ENDING, View, end_view, follow_to_the_end
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.run_lock import RunLock
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.children import tail
from prorl_hpc.slurm.endings import Ending, read_ending, read_stop
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.run_index import register_run
from prorl_hpc.slurm.traces import storage_hint


def run_attempt(
    run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool, lock: RunLock | None = None
) -> int:
    """Submit and, unless ``detach``, show the run until it ends; returns the exit code. ``lock``: the run's, where the
    caller has it: it is released when the job is written down."""
    job, came = submitted(run, config, plan, lock)
    print(f"run {run.path}  ({job.description})", flush=True)
    if came:
        return _told(run, job, end_view(run, job, came[0]))
    if detach:
        print(f"look: prorl-hpc status {run.path}\nstop: prorl-hpc stop {run.path}")
        return 0
    return follow_and_tell(run, config, job)


def submitted(
    run: RunDirectory, config: ProrlConfig, plan: Plan, lock: RunLock | None = None
) -> tuple[Job, list[signal.Signals]]:
    """Submit and put the run into the index; returns the job, and the signals that came meanwhile and were put off."""
    with _SignalsHeld() as held:
        job = submit(run, config, plan, lock)
        _register(run)
        return job, held.came


def follow_and_tell(run: RunDirectory, config: ProrlConfig, job: Job) -> int:
    """Show the run until it ends, and how it ended; returns the exit code: 128 and the signal's number where only the
    view of a Slurm job ended."""
    return _told(run, job, follow_to_the_end(run, config, job))


def _told(run: RunDirectory, job: Job, view: View) -> int:
    return view.left or tell_ending(run, job, interrupted=view.interrupted)


def _register(run: RunDirectory) -> None:
    try:
        register_run(run)
    except OSError as error:  # it runs already, and can be named by its directory
        print(f"{run.run_id} could not be put into the index of your runs: {error}", file=sys.stderr)


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
    if hint := storage_hint(run, job):
        print(f"  {hint}", file=sys.stderr)
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
    if figures.bad_agent_exits:
        yield (
            f"agent:      {figures.bad_agent_exits} of {sum(figures.status_counts.values())} rollouts ended with an "
            "agent_exit_code other than 0: what the agent said last is in the workers' logs"
        )
    yield f"report:     {run.report_file}"
    if run.reward_plot.exists():
        yield f"curve:      {run.reward_plot}"
    if figures.checkpoints:
        yield f"checkpoint: {figures.checkpoints[-1]}"


def _reward(record: dict[str, object]) -> str:
    value = record.get("reward")
    return f"{value:.3f}" if isinstance(value, float | int) else "?"


class _SignalsHeld:
    """A context in which a signal that would end this process is put off: ``came``. Between sbatch and the job's record
    it would leave a job that nobody knows of."""

    def __init__(self) -> None:
        self.came: list[signal.Signals] = []

    def __enter__(self) -> _SignalsHeld:
        heeded = [n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._put_off) for number in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._put_off:
                signal.signal(number, handler)
        if self.came and any(error):  # nothing was submitted, and nothing else is to be
            raise KeyboardInterrupt(self.came[0].name)

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number))
