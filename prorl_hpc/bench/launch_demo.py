"""Many requeues in a row of the demonstration: the real trainer, the tiny model on the transformers engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.launch_cluster import ClusterRun, private_cluster
from prorl_hpc.bench.launch_cuts import cut, how_cut, limit_attempts, reasons, recorded
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import compose
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.metrics import MetricsLog

_LEAD_S = 35.0
"""The trainer takes some ten seconds to load; then a step or more must fit in."""
_STEPS_A_REQUEUE = 4
_WORDS = ("experiment=quick", "cluster=slurm", "engine=transformers", "sandbox=local", "trainer.eval_prompts=8")
_PLACES = ("rollout.nodes=2", "rollout.partition=cpu", "inference.partition=gpu", "inference.gpus=1")


def measure(requeues: int, say: Say) -> list[Figure]:
    """RunError without root, Slurm or the tiny model, or if the run does not end as it should."""
    model = prepared_model("tiny")
    if not model.is_dir():
        raise RunError(f"{model} is not there: `prorl-hpc model prepare tiny` makes it")
    with scratch_directory() as directory, private_cluster(directory, model) as cluster:
        say(f"{requeues} requeues of the demonstration")
        job = ClusterRun(cluster, _config(directory, model, requeues), {})
        cut(job, requeues, lambda run: len(steps_of(run)), say)
        return figures(requeues, job.run)


def _config(directory: Path, model: Path, requeues: int) -> ProrlConfig:
    places = [f"cluster.{words}" for words in (*_PLACES, "trainer.partition=gpu", "trainer.gpus=1")]
    more = [f"run.root={directory / 'runs'}", f"model.path={model}", f"trainer.steps={_STEPS_A_REQUEUE * requeues}"]
    config = compose([*_WORDS, *places, *more])
    # on a loaded machine an attempt of half a minute may fit no step in
    config.cluster.requeue_without_progress = requeues + 1
    limit_attempts(config, _LEAD_S)
    return config


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    """The trainer's own records of its steps; none while there is no file."""
    return [record for record in MetricsLog(run.metrics_file).read() if record["kind"] == "step"]


def figures(requeues: int, run: RunDirectory) -> list[Figure]:
    """Of a run that is over. RunError if it did not end as it should."""
    ends, steps = reasons(run), steps_of(run)
    trained = Counter(int(record["step"]) for record in steps)
    wanted = run.load_config().trainer.steps
    failed = recorded(run, "failed", "timed_out")
    twice = sum(times - 1 for times in recorded(run, "done").values())
    how = f"{how_cut(ends)}; tiny model, transformers engine, the real trainer"
    return [
        Figure.at_least("demo: requeues survived", len(ends) - 1, requeues, "requeues", "asked for", how),
        Figure.exactly("demo: steps trained", len(trained), wanted, "steps", "ordered"),
        Figure.exactly("demo: steps trained twice", trained.total() - len(trained), 0, "steps", "trained"),
        Figure.exactly("demo: batches not whole", len(incomplete(run, steps)), 0, "batches", "what was trained on"),
        Figure.exactly("demo: rollouts failed", len(failed), 0, "rollouts", "recorded"),
        Figure.exactly("demo: rollouts recorded twice", twice, 0, "rollouts", "Parquet files"),
    ]


def incomplete(run: RunDirectory, steps: list[dict[str, Any]]) -> list[int]:
    """Steps that were trained on more groups than their file of rollouts holds."""
    short = []
    for record in steps:
        file = run.rollouts / f"step-{record['step']}.parquet"
        columns = ["group_id", "group_outcome"]
        rows = pq.read_table(file, columns=columns).to_pylist() if file.exists() else []
        groups = {row["group_id"] for row in rows if row["group_outcome"] == "accepted"}
        if len(groups) < record["groups_accepted"]:
            short.append(int(record["step"]))
    return short
