"""What must hold on this machine before anything is allocated; everything that does not is listed at once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from prorl_hpc.cli.preflight_data import data_problems, data_warnings
from prorl_hpc.cli.preflight_model import model_problems
from prorl_hpc.cli.preflight_shell import shell_problems
from prorl_hpc.cli.preflight_slurm import slurm_problems, slurm_warnings
from prorl_hpc.config.cluster_validation import wasted
from prorl_hpc.config.policies import models_of
from prorl_hpc.config.policy_validation import FUNCTION
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError, filled_in
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.size_validation import size_errors
from prorl_hpc.config.text_validation import text_errors
from prorl_hpc.config.tool_validation import unused_tools
from prorl_hpc.config.trainer_files import trainer_problems
from prorl_hpc.inference.factory import KINDS, resolve_engine
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.trainer.model_recipes import RECIPES, is_prepared

_TRAINER_PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "tensorboard")
_GIB = 2**30


def preflight(config: ProrlConfig, *, starting: bool = True) -> list[str]:
    """All that is wrong, each as a sentence with its cure. ``starting``: not for a dry run, which needs no Slurm. Nothing
    is looked at where sizes are out of all bounds (rows and nodes would be counted out one by one) or texts cannot be
    names of files."""
    if any(size_errors(config)) or any(text_errors(config)):
        return []
    checks: list[Callable[[ProrlConfig], Iterator[str]]] = [
        _run_root,
        _runtime_root,
        _disk,
        *([_memory] if starting else []),
        model_problems,
        trainer_problems,
        _replay,
        _rewards,
        _packages,
        data_problems,
        shell_problems,
    ]
    found = [error for check in checks for error in check(config)]
    return [*found, *slurm_problems(config, starting=starting)]


def warnings(config: ProrlConfig, *, starting: bool = True) -> list[str]:
    """What is allowed and hardly meant."""
    if any(size_errors(config)) or any(text_errors(config)):
        return []
    lacking = [] if starting else _memory(config)
    found = [*lacking, *wasted(config), *unused_tools(config), *data_warnings(config)]
    return [*found, *slurm_warnings(config, starting=starting)]


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
    if root.is_dir() and root.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        yield (
            f"run.root={config.run.root}: everybody may write in {root} and replace what is in it: chmod o-w {root}, or "
            "set run.root to another directory"
        )
    if reason:
        yield f"run.root={config.run.root} cannot be written ({reason}): set run.root to another directory"


def _runtime_root(config: ProrlConfig) -> Iterator[str]:
    root, local = config.run.runtime_root, config.cluster.kind == "local"
    try:
        RunDirectory.check_socket_length(RunDirectory("/x").runtime_dir(root))
    except RunDirectoryError as error:
        if local or "$" not in root:  # else a variable that only the job's nodes have
            yield str(error)
        return
    if local and not os.access(filled_in(root), os.W_OK | os.X_OK):
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
        smaller = "" if config.model.prepare == "tiny" else "take a smaller model (model=tiny), "
        yield (
            f"this machine has {free:.1f} GiB of memory available, this run needs run.min_free_memory_gib="
            f"{config.run.min_free_memory_gib:g}: end other programs, {smaller}or set run.min_free_memory_gib lower if "
            "you know that less is enough"
        )


def _replay(config: ProrlConfig) -> Iterator[str]:
    replay = config.engine.script.get("replay")
    if isinstance(replay, str) and replay and not Path(replay).expanduser().is_file():
        yield f"engine.script.replay={replay}: there is no such file; it is JSONL of prompts and replies"


def _packages(config: ProrlConfig) -> Iterator[str]:
    """Those that this machine's processes need; with an image of their own they are in there."""
    cluster = config.cluster
    in_image = {
        name: cluster.container.image or getattr(cluster, name).container
        for name in ("rollout", "inference", "trainer")
    }
    models = models_of(config).values()
    recipes = {model.prepare for model in models if not model.path and model.prepare in RECIPES}
    if not all(map(is_prepared, recipes)):
        yield from _missing("making the model", ("torch", "transformers"), "train")
    if cluster.inference.nodes and not in_image["inference"] and config.engine.kind in KINDS:
        try:
            resolve_engine(config.engine.kind)
        except ConfigError as error:
            yield str(error)
    if config.trainer.enabled and not in_image["trainer"]:
        yield from _missing("the trainer", _TRAINER_PACKAGES, "train")
        if config.trainer.wandb in ("offline", "online") and importlib.util.find_spec("wandb") is None:
            yield (
                f"trainer.wandb={config.trainer.wandb} needs the package wandb, which is not installed here: pip install 'prorl_hpc[wandb]', "
                "or set trainer.wandb=off (metrics.jsonl and TensorBoard are written always)"
            )


def _rewards(config: ProrlConfig) -> Iterator[str]:
    """Reward functions of policies must import, here as on the workers."""
    if not any(policy.reward for policy in config.policies.values()):
        return
    from prorl_hpc.worker.rewards import PolicyReward

    for name, policy in config.policies.items():
        if FUNCTION.fullmatch(policy.reward):  # else the validation tells
            try:
                PolicyReward(name, policy.reward)
            except ConfigError as error:
                yield str(error)


def _missing(what: str, packages: tuple[str, ...], extra: str) -> Iterator[str]:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        yield f"{what} needs {', '.join(absent)}: pip install 'prorl_hpc[{extra}]'"
