"""Choices of groups (``latency=mine``): what Hydra reads as no name is refused, for it breaks over it; and what is told of
those that there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep
from hydra.errors import HydraException

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import conf_dir, own_conf_dir, user_conf_dirs
from prorl_hpc.messages.errors import ConfigError


def groups(own_dir: Path | None = None) -> list[str]:
    """Names of the groups of our directory and the user's. ``own_dir``: that of ``--config-dir``."""
    return sorted({path.name for root in roots(own_dir) for path in root.iterdir() if path.is_dir()})


@cache
def _defaults() -> dict[str, str | None]:
    """Group → what is chosen where no word says another; None: nothing."""
    listed = msgspec.yaml.decode((conf_dir() / "config.yaml").read_bytes())["defaults"]
    entries = [entry for entry in listed if isinstance(entry, dict)]
    return {group: choice for entry in entries for group, choice in entry.items() if group.isidentifier()}


def check_choices(arguments: Iterable[str], own_dir: Path | None) -> None:
    """Raises ConfigError for a group whose choice is a number, true, false, null, a list or names with values."""
    for word in arguments:
        name, equals, value = word.partition("=")
        group = name.lstrip("+").partition("@")[0]
        if not equals or not group.isidentifier() or not (read := read_as(word)) or group not in groups(own_dir):
            continue
        told = f"{word}: {group} is a group, chosen by name{choices_of(group, own_dir)}. "
        settings = value.startswith(("[", "{")) and group in {field.name for field in fields(ProrlConfig)}
        told += f"Its settings are {group}.NAME=VALUE" if settings else f"This is {read}"
        if value == "null" and _defaults().get(group, "") is None:
            told += "; leave it out to choose none"
        hidden = [root / group / f"{value}.yaml" for root in roots(own_dir)]
        told += "".join(f"; give {path} another name to choose it" for path in hidden if path.is_file())
        raise ConfigError(told)


def read_as(word: str) -> str:
    """What Hydra reads the value of ``NAME=VALUE`` as, if it can be no name of a choice: ``a list``. Empty if it can, or if
    the word cannot be read at all, which Hydra tells."""
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return ""
    return _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, ChoiceSweep):
        return next(filter(None, map(_kind, value.list)), "")
    if value is None:
        return "no name to YAML, but null"
    if isinstance(value, bool):
        return "no name to YAML, but true or false"
    if isinstance(value, int | float | RangeSweep | IntervalSweep):
        return "no name to YAML, but a number"
    return "a list" if isinstance(value, list) else "names and values" if isinstance(value, dict) else ""


def choices_of(group: str, own_dir: Path | None = None) -> str:
    """Behind "chosen by name": ``: local, slurm``."""
    return f": {', '.join(sorted({path.stem for root in roots(own_dir) for path in (root / group).glob('*.yaml')}))}"


def how_to_make(group: str) -> str:
    """A choice of one's own."""
    if group == "latency":
        return f"`prorl-hpc bench fit RUN --name NAME` makes one, {own_conf_dir() / group}/NAME.yaml"
    return f"one is a file {own_conf_dir() / group}/NAME.yaml"


def roots(own_dir: Path | None) -> list[Path]:
    """Directories of groups; the first that has a choice counts."""
    return [conf_dir(), *([own_dir] if own_dir else []), *user_conf_dirs()]
