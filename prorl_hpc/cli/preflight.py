"""What must hold on this machine before anything is allocated; everything that does not is listed at once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.model_directory import check_model_dir
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.inference.factory import KINDS, resolve_engine
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.resolving import check
from prorl_hpc.sandbox.images.sif import this_architecture
from prorl_hpc.slurm.script import check_extra
from prorl_hpc.tasks.dataset import Row, Split, load_rows
from prorl_hpc.tasks.protocol import needs_of
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.trainer.model_recipes import RECIPES, is_prepared

_TRAINER_PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "tensorboard")
_GIB = 2**30
_SHOWN_IMAGES = 3


def preflight(config: ProrlConfig) -> list[str]:
    """All that is wrong, each as a sentence with its cure."""
    checks: list[Callable[[ProrlConfig], Iterator[str]]] = [
        _run_root,
        _runtime_root,
        _disk,
        _memory,
        _model,
        _engine,
        _trainer,
        _dataset,
        _slurm,
    ]
    return [error for check in checks for error in check(config)]


def check_model(path: Path) -> list[str]:
    """Whether a model directory has what a run needs: weights, tokenizer and an extendable chat template."""
    try:
        check_model_dir(path)
    except ValueError as error:
        return [str(error)]
    try:
        ChatFormat.open(path)
    except ConfigError as error:
        return [str(error)]
    return []


def _run_root(config: ProrlConfig) -> Iterator[str]:
    """Nothing is made here: a dry run leaves no directory behind."""
    root = Path(config.run.root).absolute()
    place = next(p for p in (root, *root.parents) if os.path.lexists(p))
    reason = ""
    if not place.is_dir():
        reason = f"{place} is not a directory"
    else:
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            reason = f"{place}: {error.strerror}"
    if reason:
        yield f"run.root={config.run.root} cannot be written ({reason}): set run.root to another directory"


def _runtime_root(config: ProrlConfig) -> Iterator[str]:
    root = config.run.runtime_root
    longest = RunDirectory("/x").runtime_dir(root)
    try:
        RunDirectory.check_socket_length(longest)
    except RunDirectoryError as error:
        yield str(error)
    if config.cluster.kind == "local" and not os.access(root, os.W_OK | os.X_OK):
        yield f"run.runtime_root={root} is not a directory that can be written: set it to a node-local one"


def _disk(config: ProrlConfig) -> Iterator[str]:
    root = Path(config.run.root).absolute()
    place = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(place).free / _GIB
    if free < config.run.min_free_disk_gib:
        yield (
            f"{place} has {free:.1f} GiB free, a run needs run.min_free_disk_gib={config.run.min_free_disk_gib:g}: "
            "make room, or set run.root to another file system"
        )


def _memory(config: ProrlConfig) -> Iterator[str]:
    free = psutil.virtual_memory().available / _GIB
    if config.cluster.kind == "local" and free < config.run.min_free_memory_gib:
        yield (
            f"this machine has {free:.1f} GiB of memory available, this run needs run.min_free_memory_gib="
            f"{config.run.min_free_memory_gib:g}: end other programs, or take a smaller model (model=tiny)"
        )


def _model(config: ProrlConfig) -> Iterator[str]:
    model = config.model
    if model.path:
        yield from check_model(Path(model.path).absolute())
    elif model.prepare and model.prepare not in RECIPES:
        yield f"model.prepare={model.prepare} is no recipe; recipes: {', '.join(sorted(RECIPES))}"
    elif model.prepare and not is_prepared(model.prepare):
        yield from _missing("making the model", ("torch", "transformers"), "train")


def _engine(config: ProrlConfig) -> Iterator[str]:
    if config.engine.kind not in KINDS:
        return  # validation says so
    try:
        resolve_engine(config.engine.kind)
    except ConfigError as error:
        yield str(error)


def _trainer(config: ProrlConfig) -> Iterator[str]:
    if config.trainer.enabled:
        yield from _missing("the trainer", _TRAINER_PACKAGES, "train")


def _missing(what: str, packages: tuple[str, ...], extra: str) -> Iterator[str]:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        yield f"{what} needs {', '.join(absent)}: pip install 'prorl_hpc[{extra}]'"


def _dataset(config: ProrlConfig) -> Iterator[str]:
    splits: list[Split] = ["train", "heldout"] if config.trainer.enabled else ["train"]
    told: dict[str, None] = {}
    images = {config.sandbox.image: "sandbox.image"}
    for split in splits:
        try:
            images = {**_images_asked_for(config, split, load_rows(config.task, split)), **images}
        except ConfigError as error:
            told[str(error)] = None
    yield from told
    if config.sandbox.kind != "local":
        yield from _images(config, images)


def _images_asked_for(config: ProrlConfig, split: Split, rows: list[Row]) -> dict[str, str]:
    """Image → who asks for it, for the rows that ask for one of their own."""
    handler = get_handler(config.task.name, config.task)
    asked: dict[str, str] = {}
    for row in rows:
        try:
            needs = needs_of(handler, row)
        except Exception as error:  # the task's own code
            raise ConfigError(
                f"task.{split}: {config.task.name} cannot say what row {row['id']} needs of its sandbox: "
                f"{type(error).__name__}: {error}"
            ) from error
        if needs.image:
            asked.setdefault(needs.image, f"task.{split}, row {row['id']}")
    return asked


def _images(config: ProrlConfig, images: dict[str, str]) -> Iterator[str]:
    architecture = this_architecture() if config.cluster.kind == "local" else ""
    wrong = []
    for image, who in images.items():
        try:
            check(image, architecture)
        except SandboxError as error:
            wrong.append(f"{who}: {error}")
    yield from wrong[:_SHOWN_IMAGES]
    if len(wrong) > _SHOWN_IMAGES:
        yield (
            f"{len(wrong) - _SHOWN_IMAGES} more images of {len(images)} cannot be used: `prorl-hpc image convert LIST` "
            "brings in many at a time"
        )


def _slurm(config: ProrlConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.kind != "slurm":
        return
    absent = [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]
    if absent:
        yield (
            f"cluster=slurm needs {', '.join(absent)} on PATH: run this on a login node of the cluster, or leave "
            "cluster=slurm out to train on this machine"
        )
    known = site_options()
    yield from check_extra("cluster.extra", cluster.extra, known)
    for name in ("rollout", "inference", "trainer"):
        yield from check_extra(f"cluster.{name}.extra", getattr(cluster, name).extra, known)


def site_options() -> list[str]:
    """Long options that this site's sbatch lists, those of its plugins included; empty without an sbatch."""
    if shutil.which("sbatch") is None:
        return []
    text = subprocess.run(["sbatch", "--help"], capture_output=True, text=True).stdout
    return [word.removeprefix("--").split("=")[0].split("[")[0] for word in text.split() if word.startswith("--")]
