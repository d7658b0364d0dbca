"""How long a job takes until its first rollout starts, new and after a requeue: real processes, an engine without model.

Each turn is a heterogeneous job of its own on the realistic private cluster: coordinator and two workers on two CPU
nodes, an inference agent with the scripted engine, and a trainer that learns nothing and orders a batch as soon as the
API is there. It is requeued from outside while rollouts are under way.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.launch_cluster import ClusterRun, private_cluster
from prorl_hpc.bench.launch_marks import Marks, allocated_at, mark_line
from prorl_hpc.bench.noted_task import NOTED_TASK, InitNote, read_notes
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.schema import (
    ClusterConfig,
    ComponentConfig,
    EngineConfig,
    ModelConfig,
    ProrlConfig,
    RunSettings,
    SandboxConfig,
    TaskConfig,
    TrainerConfig,
)
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
from prorl_hpc.tasks.testing import write_chat_model

GOAL_S = 3.0
_START_S = 90.0
MODULES = {"trainer": "prorl_hpc.bench.counting_trainer"}


@dataclass(frozen=True)
class Start:
    """One attempt's. ``own_s``: from the job's first instruction to the first INIT; ``slurm_s``: from the controller's
    allocation to that instruction; ``parts``: what was up when, in seconds since it."""

    own_s: float
    slurm_s: float
    parts: dict[str, float]


def scripted_config(directory: Path, name: str, trainer: TrainerConfig) -> ProrlConfig:
    """A run on the private cluster without a model. INITs and starts are noted in ``<directory>/<name>.{inits,marks}``."""
    model = directory / "model"
    return ProrlConfig(
        run=RunSettings(name=name, root=str(directory / "runs"), start_timeout_s=60.0),
        cluster=ClusterConfig(
            kind="slurm",
            time_minutes=10,
            setup=[mark_line(marks_file(directory, name))],
            rollout=ComponentConfig(nodes=2, cpus=2, partition="cpu"),
            inference=ComponentConfig(nodes=1, cpus=2, gpus=1, partition="gpu"),
            trainer=ComponentConfig(nodes=1, cpus=2, gpus=1, partition="gpu"),
        ),
        model=ModelConfig(name="none", path=str(model if model.exists() else write_chat_model(model))),
        engine=EngineConfig(kind="scripted"),
        sandbox=SandboxConfig(kind="local"),
        task=TaskConfig(name=NOTED_TASK, options={"notes": str(notes_file(directory, name))}),
        trainer=trainer,
    )


def marks_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.marks"


def notes_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.inits"


def measure(turns: int, say: Say) -> list[Figure]:
    """RunError if there can be no such cluster here."""
    new, again = [], []
    with scratch_directory() as directory, private_cluster(directory) as cluster:
        for turn in range(turns):
            first, second = _turn(cluster, directory, f"start-{turn}")
            say(f"turn {turn + 1} of {turns}: {_told(first)}; requeued: {_told(second)}")
            new.append(first)
            again.append(second)
    return [
        *_figures("allocation to first rollout", new),
        *_figures("requeue: new attempt to first continued rollout", again),
    ]


def _turn(cluster: NamespacedSlurm, directory: Path, name: str) -> tuple[Start, Start]:
    # More rollouts than the slots take at once: the batch is under way when the job is requeued.
    settings = TrainerConfig(steps=1000, groups_per_step=64, group_size=8)
    job = ClusterRun(cluster, scripted_config(directory, name, settings), MODULES)
    try:
        first = _start(cluster, job, directory, name, 1)
        job.requeue()
        return first, _start(cluster, job, directory, name, 2)
    finally:
        job.cancel()
        job.wait("the end of the job", lambda: job.over, _START_S)


def _start(cluster: NamespacedSlurm, job: ClusterRun, directory: Path, name: str, attempt: int) -> Start:
    inits: list[InitNote] = []

    def begun() -> bool:
        inits[:] = [note for note in read_notes(notes_file(directory, name)) if note.attempt == attempt]
        return bool(inits)

    job.wait(f"the first rollout of attempt {attempt}", begun, _START_S)
    marks = Marks(marks_file(directory, name), job.attempt(attempt))
    allocated = allocated_at(cluster.directory / "log" / "slurmctld.log", job.job_id, attempt)
    return Start(min(note.time for note in inits) - marks.first, marks.first - allocated, marks.since_first())


def _figures(name: str, starts: list[Start]) -> list[Figure]:
    middle = sorted(starts, key=lambda start: start.own_s)[len(starts) // 2]
    worst = max(start.own_s for start in starts)
    detail = f"median of {len(starts)} jobs, the slowest {worst:.2f} s; of the median: {_told(middle)}"
    own = statistics.median(start.own_s for start in starts)
    slurm = statistics.median(start.slurm_s for start in starts)
    return [
        Figure.at_most(f"{name}, our own time", own, GOAL_S, "s", "the job's first instruction", detail),
        Figure.told(f"{name}, Slurm's share before it", slurm, "s", "the controller's log of the allocation"),
    ]


def _told(start: Start) -> str:
    parts = ", ".join(f"{what} {seconds:.2f}" for what, seconds in start.parts.items())
    return f"{parts}, first INIT {start.own_s:.2f} s"
