"""What is wrong in a file of a group, such as a site's ``cluster/mysite.yaml``: all of it, with the file's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError  # type: ignore[import-untyped]
from yaml.reader import ReaderError  # type: ignore[import-untyped]

from prorl_hpc.cli.composition_choices import roots
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError

_IN_FILE = re.compile(r"In '([^']+)': ")
"""How Hydra begins what it says of a file: with group/choice."""


def file_at_fault(error: Exception, own_dir: Path | None) -> tuple[str, Path] | None:
    """Group and file that ``error`` is about; None if it is about no file of a group. ``own_dir``: that of
    ``--config-dir``."""
    if isinstance(error, UnicodeDecodeError):
        files = [path for root in roots(own_dir)[1:] for path in root.glob("*/*.yaml")]
        return next(((path.parent.name, path) for path in files if error.object in path.read_bytes()), None)
    if isinstance(error, ReaderError):
        return Path(error.name).parent.name, Path(error.name)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        path = Path(error.problem_mark.name)
        return path.parent.name, path
    found = _IN_FILE.match(str(error)) if isinstance(error, HydraException) else None
    group, _, choice = found[1].rpartition("/") if found else ("", "", "")
    if not group:
        return None
    files = [root / group / f"{choice}.yaml" for root in roots(own_dir)]
    return next(((group, path) for path in files if path.is_file()), None)


def file_problems(error: Exception, group: str, path: Path, explain: Callable[[Exception], str]) -> list[str]:
    """Each as a sentence that begins with the file; ``explain`` says what OmegaConf means."""
    if isinstance(error, UnicodeDecodeError | ReaderError):
        return [f"{path} is not YAML, which is text in UTF-8: {error.reason}"]
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        return [f"{path}{line} is not YAML: {', '.join(filter(None, (error.context, error.problem)))}"]
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        return [f"{path}: it must hold settings, written NAME: VALUE"]
    package = re.search(r"^#\s*@package\s+(\S+)", path.read_text(), re.MULTILINE)
    prefix = {"_global_": "", "_group_": group}.get(package[1], package[1]) if package else group
    if prefix.partition(".")[0] not in ("", *(field.name for field in fields(ProrlConfig))):
        return [
            f"{path} needs a first line `# @package _global_`, since files of {group} hold settings of the whole configuration; it "
            + (f"has `# @package {package[1]}`" if package else "has no such line")
        ]
    found = [f"{path}: {explain(wrong)}" for wrong in _wrong(loaded, prefix)]
    return found or [f"{path}: {explain(error)}"]


def check_not_empty(chosen: dict[str, Path]) -> None:
    """Raises ConfigError for a file of the whole configuration (group → file) without settings: choosing it does nothing."""
    for group, path in chosen.items():
        if not OmegaConf.load(path) and group not in {field.name for field in fields(ProrlConfig)}:
            raise ConfigError(f"{path} holds no settings: {group}={path.stem} would change nothing")


def _wrong(loaded: DictConfig, prefix: str) -> Iterator[Exception]:
    """What OmegaConf says to each of the file's settings by itself."""
    for name, value in loaded.items_ex(resolve=False):
        if name == "defaults" or (not prefix and name == "hydra"):
            continue
        key = f"{prefix}.{name!s}" if prefix else str(name)
        schema = OmegaConf.structured(ProrlConfig)
        try:
            known = OmegaConf.select(schema, key)
        except OmegaConfBaseException as error:
            yield error
            continue
        if isinstance(value, DictConfig) and OmegaConf.is_config(known) and OmegaConf.get_type(known) is not dict:
            yield from _wrong(value, key)
            continue
        try:
            OmegaConf.update(schema, key, value)
        except OmegaConfBaseException as error:
            yield error
