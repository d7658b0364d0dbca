"""Many requeues of one training run in a row, from outside and by its time limit: what is lost, what is done twice.

The same processes as in ``launch_start``: all of ours are real but the engine, which is scripted, and the trainer, which
counts what it gets in place of learning from it, and keeps a checkpoint. The same run without any requeue is the measure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from prorl_hpc.bench.counting_trainer import read_steps
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.launch_cluster import ClusterRun, private_cluster
from prorl_hpc.bench.launch_start import MODULES, notes_file, scripted_config
from prorl_hpc.bench.noted_task import read_notes
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.endings import Ending, read_ending
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm

_ATTEMPT_S = 180.0
_LIMIT_MINUTES = 1
_LEAD_S = 35.0
"""So long before its end an attempt leaves off that is not requeued from outside."""
_LONG_MINUTES = 60
_STEPS_A_REQUEUE = 4


@dataclass(frozen=True)
class Outcome:
    """What a run came to. ``trained``: how often each step was; ``done``: rollouts that came back to the trainer done,
    ``recorded``: how often each is in the Parquet files; ``begun``: INITs; ``ends``: reasons, of all attempts."""

    trained: Counter[int]
    done: set[str]
    recorded: Counter[str]
    begun: int
    ends: list[str]

    @classmethod
    def of(cls, run: RunDirectory, notes: Path) -> Outcome:
        """Of a run that is over. RunError unless all attempts but the last were suspended, and that finished it."""
        endings = [read_ending(attempt) for attempt in run.all_attempts()]
        words = [ending.ending if ending is not None else None for ending in endings]
        if words[-1] is not Ending.FINISHED or {*words[:-1]} - {Ending.SUSPENDED}:
            raise RunError(f"the attempts of {run.run_id} ended {', '.join(map(str, words))}: see {run.path}")
        steps = read_steps(run)
        return cls(
            Counter(note.step for note in steps),
            {rollout for note in steps for rollout in note.done},
            _recorded(run),
            len(read_notes(notes)),
            [ending.reason for ending in endings if ending is not None],
        )


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError if there can be no such cluster here, or a run does not end as it should."""
    requeues = 3 if quick else 20
    trainer = TrainerConfig(steps=_STEPS_A_REQUEUE * requeues, groups_per_step=16, group_size=8)
    with scratch_directory() as directory, private_cluster(directory) as cluster:
        say(f"{trainer.steps} steps without a requeue")
        straight = _run(cluster, _config(directory, "straight", trainer), notes_file(directory, "straight"), 0, say)
        say(f"the same with {requeues} requeues")
        cut = _run(cluster, _config(directory, "cut", trainer), notes_file(directory, "cut"), requeues, say)
    return figures(requeues, straight, cut)


def figures(requeues: int, straight: Outcome, cut: Outcome) -> list[Figure]:
    against = "the same run without a requeue"
    count = len(cut.ends) - 1
    limit = sum("allocation ends" in reason for reason in cut.ends[:-1])
    how = (
        f"{count - limit} by `scontrol requeue`, {limit} at the time limit; {sum(straight.trained.values())} steps, "
        f"{len(straight.done)} rollouts; scripted engine, counting trainer"
    )
    twice = sum(times - 1 for times in cut.trained.values())
    return [
        Figure.at_least("requeues survived", count, requeues, "requeues", "asked for", how),
        Figure.exactly("steps trained", len(cut.trained), len(straight.trained), "steps", against),
        Figure.exactly("steps trained twice", twice, 0, "steps", against),
        Figure.exactly("rollouts lost", len(straight.done - cut.done), 0, "rollouts", against),
        Figure.exactly("rollouts not recorded", len(cut.done - {*cut.recorded}), 0, "rollouts", "trained on"),
        Figure.exactly(
            "rollouts recorded twice", sum(n - 1 for n in cut.recorded.values()), 0, "rollouts", "Parquet files"
        ),
        Figure.told("rollouts begun again", (cut.begun - straight.begun) / max(1, count), "a requeue", against),
    ]


def _config(directory: Path, name: str, trainer: TrainerConfig) -> ProrlConfig:
    config = scripted_config(directory, name, trainer)
    config.cluster.time_minutes = _LIMIT_MINUTES if name == "cut" else _LONG_MINUTES
    config.cluster.signal_lead_s = _LEAD_S
    return config


def _run(cluster: NamespacedSlurm, config: ProrlConfig, notes: Path, requeues: int, say: Say) -> Outcome:
    job = ClusterRun(cluster, config, MODULES)
    try:
        for number in range(1, requeues + 1):
            _cut(job, number, from_outside=number % 2 == 1)
            say(f"requeue {number}: {len(read_steps(job.run))} steps done")
        if requeues:
            job.wait("the last attempt", lambda: job.run.newest_attempt > requeues, _ATTEMPT_S)
            job.set_time_limit(_LONG_MINUTES)
        job.wait("the end of the run", lambda: job.over, config.trainer.steps * 10.0 + _ATTEMPT_S, 0.5)
    finally:
        job.cancel()
    return Outcome.of(job.run, notes)


def _cut(job: ClusterRun, number: int, *, from_outside: bool) -> None:
    """Have attempt ``number`` end: from outside after its first step, while the next one's rollouts are under way."""
    attempt = job.attempt(number)

    def stepped() -> bool:
        return any(note.attempt == number for note in read_steps(job.run)) or _ended(attempt)

    if from_outside:
        job.wait(f"a step in attempt {number}", stepped, _ATTEMPT_S)
        if not _ended(attempt):
            job.requeue()
    job.wait(f"the end of attempt {number}", lambda: _ended(attempt), _ATTEMPT_S)
    if (ending := read_ending(attempt)) is not None and ending.ending is not Ending.SUSPENDED:
        raise RunError(f"attempt {number} was to be suspended and is {ending.ending}: {ending.reason}")


def _ended(attempt: RunDirectory) -> bool:
    return attempt.newest_attempt > attempt.attempt or attempt.ending_file.exists()


def _recorded(run: RunDirectory) -> Counter[str]:
    files = sorted(run.rollouts.glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["rollout_id", "status"]).to_pylist()]
    return Counter(row["rollout_id"] for row in rows if row["status"] == "done")
