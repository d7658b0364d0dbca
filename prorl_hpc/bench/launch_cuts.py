"""Has a training run on the private cluster requeued many times in a row, by turns from outside and by its time limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pyarrow.parquet as pq

from prorl_hpc.bench.launch_cluster import ClusterRun
from prorl_hpc.bench.parts import Say
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.endings import Ending, read_ending

Steps = Callable[[RunDirectory], int]
"""How many training steps a run has done."""

_ATTEMPT_S = 240.0
_STEP_S = 30.0
"""At the most, of one step that nobody disturbs."""
_LIMIT_MINUTES = 1
_LONG_MINUTES = 600


def limit_attempts(config: ProrlConfig, lead_s: float) -> None:
    """Give each attempt a minute less ``lead_s``, unless it is requeued before that."""
    config.cluster.time_minutes, config.cluster.signal_lead_s = _LIMIT_MINUTES, lead_s


def cut(job: ClusterRun, requeues: int, steps: Steps, say: Say) -> None:
    """Have ``job`` requeued so often; then wait for the end of its run. RunError if that is no good one."""
    try:
        for number in range(1, requeues + 1):
            _cut_attempt(job, number, steps, from_outside=number % 2 == 1)
            say(f"requeue {number}: {steps(job.run)} steps done")
        if requeues:
            job.wait("the last attempt", lambda: job.run.newest_attempt > requeues, _ATTEMPT_S)
            job.set_time_limit(_LONG_MINUTES)
        left = job.run.load_config().trainer.steps - steps(job.run)
        job.wait("the end of the run", lambda: job.over, left * _STEP_S + _ATTEMPT_S, 0.5)
    finally:
        job.cancel()


def _cut_attempt(job: ClusterRun, number: int, steps: Steps, *, from_outside: bool) -> None:
    """Have attempt ``number`` end: from outside after its first step, while the next one's rollouts are under way."""
    attempt, before = job.attempt(number), steps(job.run)
    if from_outside:
        job.wait(f"a step in attempt {number}", lambda: steps(job.run) > before or _ended(attempt), _ATTEMPT_S)
        if not _ended(attempt):
            job.requeue()
    job.wait(f"the end of attempt {number}", lambda: _ended(attempt), _ATTEMPT_S)
    if (ending := read_ending(attempt)) is not None and ending.ending is not Ending.SUSPENDED:
        raise RunError(f"attempt {number} was to be suspended and is {ending.ending}: {ending.reason}")


def _ended(attempt: RunDirectory) -> bool:
    return RunDirectory(attempt.path).newest_attempt > attempt.attempt or attempt.ending_file.exists()


def reasons(run: RunDirectory) -> list[str]:
    """Why each attempt ended. RunError unless all but the last were suspended, and that one finished the run."""
    endings = [read_ending(attempt) for attempt in run.all_attempts()]
    words = [ending.ending if ending is not None else None for ending in endings]
    if words[-1] is not Ending.FINISHED or {*words[:-1]} - {Ending.SUSPENDED}:
        raise RunError(f"the attempts of {run.run_id} ended {', '.join(map(str, words))}: see {run.path}")
    return [ending.reason for ending in endings if ending is not None]


def how_cut(ends: list[str]) -> str:
    """For people."""
    limit = sum("allocation ends" in reason for reason in ends[:-1])
    return f"{len(ends) - 1 - limit} by `scontrol requeue`, {limit} at the time limit"


def recorded(run: RunDirectory, *statuses: str) -> Counter[str]:
    """How often each rollout that ended so is in the run's Parquet files."""
    files = sorted(run.rollouts.glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["rollout_id", "status"]).to_pylist()]
    return Counter(row["rollout_id"] for row in rows if row["status"] in statuses)
