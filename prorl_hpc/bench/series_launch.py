"""Launches a point of a series: one ordinary run without a trainer, and beside its coordinator the load process."""

from __future__ import annotations

import importlib.metadata
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from prorl_hpc.bench.scaling_records import ORDER_FILE, PointSpec
from prorl_hpc.bench.series_folder import KEPT, MODEL
from prorl_hpc.cli.attempt import submitted
from prorl_hpc.cli.composition import Composed, compose_all
from prorl_hpc.cli.following import stop_at_once
from prorl_hpc.cli.launch import all_errors, launch
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.script_settings import latency_words, script_settings
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.plan import NodePlan, Plan, ProcessPlan

LOAD_PROCESS = "load-0"
WORDS = (
    "trainer.enabled=false",
    *("run.drain_s=0", "run.stop_timeout_s=10", "cluster.signal_lead_s=20"),  # there is nothing to save at a time limit
    *("rollout.init_s=600", "rollout.run_s=3600", "rollout.eval_s=600", "rollout.total_s=5000", "rollout.wall_s=86400"),
)
"""The workload says how long rollouts take: no clock of ours cuts them short, nor those that wait from the start."""
PRIVATE_WORDS = ("cluster=slurm", "cluster.rollout.partition=cpu", "cluster.inference.partition=cpu")
"""What a cluster of this machine's own is asked for: without GPUs a node is as good as any other."""


def point_words(spec: PointSpec, place: str, folder: Path) -> list[str]:
    """``spec.overrides`` with what follows from the place and the folder of the series."""
    words = [*WORDS, *_place(place, spec.overrides), *_model(spec.overrides, folder), *spec.overrides]
    sizes = (
        [_times("rollout.workers_per_node", spec), _times("engine.servers_per_node", spec)]
        if place == "local"
        else [f"cluster.rollout.nodes={spec.nodes}", f"cluster.inference.nodes={spec.nodes}"]
    )
    limits = [f"cluster.time_minutes={spec.time_minutes}", "cluster.requeue=false"]
    named = [f"run.name={spec.name}", f"run.root={folder.absolute() / 'runs'}"]
    return last_of_each([*words, *sizes, *limits, *named])


def _place(place: str, overrides: Sequence[str]) -> list[str]:
    if place == "private":
        return list(PRIVATE_WORDS)
    given = any(word.startswith("cluster=") for word in overrides)
    return [] if place == "local" or given else ["cluster=slurm"]


def _model(overrides: Sequence[str], folder: Path) -> list[str]:
    """A scripted engine needs a tokenizer alone, which is made here; who names a model gets that one's."""
    if last(overrides, "engine") != "scripted" or any(w.startswith(("model=", "model.path=")) for w in overrides):
        return []
    return ["model=path", "model.name=tokenizer", f"model.path={folder.absolute() / MODEL}"]


def last_of_each(words: Iterable[str]) -> list[str]:
    """Of words ``name=value`` with the same name the last one, in its place: Hydra takes no group twice."""
    kept: dict[str, str] = {}
    for word in words:
        name = word.partition("=")[0].lstrip("+")
        kept.pop(name, None)
        kept[name] = word
    return list(kept.values())


def last(overrides: Sequence[str], name: str) -> str:
    """The value that holds of ``name``; empty if none is given."""
    values = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == name]
    return values[-1] if values else ""


def _times(name: str, spec: PointSpec) -> str:
    """On one machine what each of the nodes has is there ``nodes`` times."""
    return f"{name}={int(last(spec.overrides, name) or 1) * spec.nodes}"


def compose_points(points: Sequence[PointSpec], place: str, folder: Path) -> list[Composed]:
    """The configuration of each point, all of them checked, at the site's Slurm too; nothing is started. Raises
    ConfigError that tells all that is wrong, and with which points."""
    if any(_model(spec.overrides, folder) for spec in points) and not (folder / MODEL).exists():
        _write_model(folder)
    kept = folder / KEPT
    own = ["--config-dir", str(kept)] if kept.is_dir() else []
    composed = [
        _named(made, spec) for spec in points for made in compose_all([*own, *point_words(spec, place, folder)])
    ]
    if errors := all_errors(composed, starting=True):
        count = "one thing is" if len(errors) == 1 else f"{len(errors)} things are"
        told = "".join(f"\n  - {error}" for error in errors)
        raise ConfigError(f"{count} wrong with this series, nothing was started:{told}")
    _keep_files(composed, kept)
    return composed


def _keep_files(composed: Iterable[Composed], kept: Path) -> None:
    """Copies of the user's own files that say what is measured: the series goes on with them, changed or gone meanwhile."""
    for entry in composed:
        for group, file in entry.own_files.items():
            copy = kept / group / file.name
            if group != "cluster" and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _write_model(folder: Path) -> None:
    """Whole or not at all."""
    from prorl_hpc.tasks.testing import write_chat_model

    aside = folder / f".{MODEL}"
    shutil.rmtree(aside, ignore_errors=True)
    write_chat_model(aside).rename(folder / MODEL)


def _named(entry: Composed, spec: PointSpec) -> Composed:
    """An error says with which point, not with all its words."""
    return Composed(entry.config, [spec.name], entry.own_files)


def launch_point(spec: PointSpec, entry: Composed, made_known: Callable[[RunDirectory], None]) -> RunDirectory:
    """Submit the run of a point; its job is in its directory. ``made_known`` is called as soon as it is submitted. Raises
    ConfigError if Slurm refuses it."""
    made: list[RunDirectory] = []

    def attempt(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
        write_json(run.path / ORDER_FILE, spec.load)
        made.append(run)
        job, came = submitted(run, config, with_load(plan))
        if came:
            stop_at_once(run, job, f"{came[0].name} in bench scaling")
            raise KeyboardInterrupt
        made_known(run)
        return 0

    if launch(entry, detach=True, attempt=attempt) != 0 or not made:
        raise RunError(f"the run of point {spec.name} was not started: what is wrong is told above")
    return made[0]


def with_load(plan: Plan) -> Plan:
    """``plan`` with the load process on the coordinator's node; its role is the trainer's, for it ends the run as one does."""
    load = ProcessPlan(LOAD_PROCESS, "trainer", "prorl_hpc.bench.point_load", world=1)
    placed = itertools.count()

    def beside(node: NodePlan) -> NodePlan:
        hosts = any(process.role == "coordinator" for process in node.processes) and next(placed) == 0
        return NodePlan([*node.processes, load]) if hosts else node

    return Plan([replace(part, nodes=[*map(beside, part.nodes)]) for part in plan.components])


def engine_words(config: ProrlConfig) -> str:
    """What answered, for the report."""
    engine = config.engine
    if engine.kind == "scripted":
        return f"scripted: {latency_words(script_settings(engine.script))}"
    package = "transformers" if engine.kind == "transformers" else "vllm"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of the inference nodes"
    return f"{package} {version}, {config.model.name}"


def workload_words(config: ProrlConfig, overrides: Sequence[str]) -> str:
    return last(overrides, "bench") or config.task.name
