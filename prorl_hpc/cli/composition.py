"""Composes the configuration with Hydra, and turns its errors into one sentence each.

Hydra stays what its users know: overrides, groups, ``--cfg job``, ``--help``, ``--multirun``, ``--config-dir``.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import conf_dir, register_schema, to_config
from prorl_hpc.messages.errors import ConfigError

_SEE = "`prorl-hpc launch --cfg job` shows every setting"


@dataclass(frozen=True)
class Composed:
    """One configuration to run, and the overrides that made it."""

    config: ProrlConfig
    overrides: list[str]


def compose_all(arguments: list[str]) -> list[Composed]:
    """What Hydra makes of the command line: one entry, several with ``--multirun``, none after ``--help`` or
    ``--cfg``, which print. Raises ConfigError."""
    found: list[tuple[DictConfig, list[str]]] = []

    def keep(composed: DictConfig) -> None:
        found.append((composed, list(HydraConfig.get().overrides.task)))

    register_schema()
    decorated = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(keep)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sweep = tempfile.TemporaryDirectory(prefix="prorl-sweep-")  # Hydra keeps a record there that nobody needs
    asked = [f"hydra.sweep.dir={sweep.name}"] if {"-m", "--multirun"} & {*arguments} else []
    sys.argv = ["prorl-hpc launch", *arguments, *asked]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions out instead of printing them and exiting
    try:
        decorated()
        return [Composed(_typed(composed), overrides) for composed, overrides in found]
    except (HydraException, OmegaConfBaseException, MissingConfigException) as error:
        raise ConfigError(explain(error)) from error
    finally:
        sweep.cleanup()
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _typed(composed: DictConfig) -> ProrlConfig:
    """By way of plain values, for OmegaConf lets `+trainer.typo=1` into a node that is typed already."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return to_config({str(key): value for key, value in values.items()})


def explain(error: Exception) -> str:
    """One sentence for a person: what was given, what is allowed."""
    if isinstance(error, MissingConfigException):
        return _explain_choice(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not an override: {str(error).splitlines()[-2].strip()}. Write group=choice or name=value"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key or 'a setting'} must be given: {cause.full_key}=…"
    key = getattr(cause, "full_key", None) or ""
    if cause is not None and ("not in '" in str(cause) or "not in struct" in str(cause)):
        return _explain_key(key)
    reason = str(cause if cause is not None else error).splitlines()[0]
    return f"{key}: {reason}" if key else reason


def _explain_choice(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or "?"
    group, _, choice = str(missing).rpartition("/")
    options = sorted(str(option) for option in error.options or [])
    near = difflib.get_close_matches(choice, options, n=1, cutoff=0.4)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"{group}={choice}: there is no such choice; {hint}choices of {group}: {', '.join(options) or 'none'}"


def _explain_key(key: str) -> str:
    """An unknown setting, with the nearest known ones."""
    parent = key.rpartition(".")[0]
    if parent in _open_dicts():
        return f"{key} is new: {parent} takes any name, written with a plus: +{key}=…"
    known = list(setting_names(ProrlConfig()))
    groups = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    candidates = list(dict.fromkeys([*known, *groups])) if parent else groups
    near = difflib.get_close_matches(key, candidates, n=2, cutoff=0.7)
    last = key.rpartition(".")[2]
    near += [name for name in known if name.rpartition(".")[2] == last and name not in near][:2]
    if near:
        return f"there is no setting {key}; did you mean {' or '.join(near)}? {_SEE}"
    inside = [name for name in known if parent and name.startswith(f"{parent}.")]
    allowed = f"settings of {parent}: {', '.join(n.removeprefix(parent + '.') for n in inside)}" if inside else _SEE
    return f"there is no setting {key}; {allowed}"


def setting_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, groups of them included."""
    for field in fields(config):
        value = getattr(config, field.name)
        yield prefix + field.name
        if is_dataclass(value):
            yield from setting_names(value, f"{prefix}{field.name}.")


def _open_dicts() -> list[str]:
    config = ProrlConfig()

    def value_at(name: str) -> Any:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return [name for name in setting_names(config) if isinstance(value_at(name), dict)]
