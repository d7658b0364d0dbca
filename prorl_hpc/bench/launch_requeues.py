"""Many requeues of one training run in a row: what is lost, what is done twice.

The same processes as in ``launch_start``: all of ours are real but the engine, which is scripted, and the trainer, which
counts what it gets in place of learning from it, and keeps a checkpoint. The same run without any requeue is the measure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.bench.counting_trainer import read_steps
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.launch_cluster import ClusterRun, private_cluster
from prorl_hpc.bench.launch_cuts import cut, how_cut, limit_attempts, reasons, recorded
from prorl_hpc.bench.launch_start import MODULES, notes_file, scripted_config
from prorl_hpc.bench.noted_task import read_notes
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm

_LEAD_S = 35.0
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
        """Of a run that is over. RunError if it did not end as it should."""
        ends, steps = reasons(run), read_steps(run)
        return cls(
            Counter(note.step for note in steps),
            {rollout for note in steps for rollout in note.done},
            recorded(run, "done"),
            len(read_notes(notes)),
            ends,
        )


def measure(requeues: int, say: Say) -> list[Figure]:
    """RunError if there can be no such cluster here, or a run does not end as it should."""
    trainer = TrainerConfig(steps=_STEPS_A_REQUEUE * requeues, groups_per_step=16, group_size=8)
    with scratch_directory() as directory, private_cluster(directory) as cluster:
        say(f"{trainer.steps} steps without a requeue")
        straight = _outcome(cluster, directory, "straight", trainer, 0, say)
        say(f"the same with {requeues} requeues")
        return figures(requeues, straight, _outcome(cluster, directory, "cut", trainer, requeues, say))


def _outcome(
    cluster: NamespacedSlurm, directory: Path, name: str, trainer: TrainerConfig, requeues: int, say: Say
) -> Outcome:
    config = scripted_config(directory, name, trainer)
    if requeues:
        limit_attempts(config, _LEAD_S)
    job = ClusterRun(cluster, config, MODULES)
    cut(job, requeues, lambda run: len(read_steps(run)), say)
    return Outcome.of(job.run, notes_file(directory, name))


def figures(requeues: int, straight: Outcome, cut_up: Outcome) -> list[Figure]:
    against = "the same run without a requeue"
    count = len(cut_up.ends) - 1
    how = f"{how_cut(cut_up.ends)}; {len(straight.done)} rollouts; scripted engine, counting trainer"
    again = sum(times - 1 for times in cut_up.trained.values())
    twice = sum(times - 1 for times in cut_up.recorded.values())
    return [
        Figure.at_least("requeues survived", count, requeues, "requeues", "asked for", how),
        Figure.exactly("steps trained", len(cut_up.trained), len(straight.trained), "steps", against),
        Figure.exactly("steps trained twice", again, 0, "steps", against),
        Figure.exactly("rollouts lost", len(straight.done - cut_up.done), 0, "rollouts", against),
        Figure.exactly("rollouts not recorded", len(cut_up.done - {*cut_up.recorded}), 0, "rollouts", "trained on"),
        Figure.exactly("rollouts recorded twice", twice, 0, "rollouts", "Parquet files"),
        Figure.told("rollouts begun again", (cut_up.begun - straight.begun) / max(1, count), "a requeue", against),
    ]
