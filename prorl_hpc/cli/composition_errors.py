"""Hydra's and OmegaConf's errors in one sentence: what was given, what is allowed, what is nearest; and which override
is to blame."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from prorl_hpc.cli.composition_choices import groups, how_to_make
from prorl_hpc.cli.composition_files import file_at_fault, file_problems
from prorl_hpc.config.schema import PolicyConfig, ProrlConfig

_WANTED = {
    "is not a ListConfig": "a list, written [a, b]",
    "is not a DictConfig": "names and values, written {name: value}",
    "Cannot assign str to": "names and values, written {name: value}",
}
"""What OmegaConf says of a value of another shape, and what it means."""
_SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(?:\+\+)?(.*)'")
"""How Hydra begins what it says of several values without --multirun."""
_SEE = "`prorl-hpc launch --help` lists every setting"


def explain(error: Exception) -> str:
    """One sentence for a person."""
    if isinstance(error, MissingConfigException):
        return _explain_choice(error)
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[-2].strip()
        return f"{error.override!r} is not an override: {reason}. Write group=choice or name=value"
    if several := _SEVERAL.match(str(error)):
        return _explain_several(several[1])
    cause = _cause(error)
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key or 'a setting'} must be given: {cause.full_key}=…"
    key = _key(error)
    if cause is not None and ("not in '" in str(cause) or "not in struct" in str(cause)):
        return _explain_key(key)
    reason = str(cause if cause is not None else error).splitlines()[0]
    if wanted := next((how for words, how in _WANTED.items() if words in reason), ""):
        return f"{key}={getattr(cause, 'value', '')}: must be {wanted}"
    if "Cannot convert 'dict' to string" in reason and (parent := key.rpartition(".")[0]) in _open_dicts():
        return f"{key}: must be a text; a name with a dot in it is written '{parent}={{NAME: value}}'"
    return f"{key}: {reason}" if key else reason


def explain_all(error: Exception, own_dir: Path | None) -> list[str]:
    """``explain``; of an error in a file of a group, all that is wrong in that file. ``own_dir``: that of
    ``--config-dir``."""
    fault = file_at_fault(error, own_dir)
    return [explain(error)] if fault is None else file_problems(error, *fault, explain)


def blamed_override(error: Exception, arguments: list[str], own_dir: Path | None = None) -> str | None:
    """The word of the command line that ``error`` is about; None if none can be named."""
    if (fault := file_at_fault(error, own_dir)) is not None:
        group, file = fault
        return next(
            (word for word in arguments if override_name(word) == group and file.stem in word.partition("=")[2]), None
        )
    if isinstance(error, OverrideParseException):
        return next((word for word in arguments if word == error.override), None)
    if several := _SEVERAL.match(str(error)):
        return next((word for word in arguments if word == several[1]), None)
    if isinstance(error, MissingConfigException):
        key = str(error.missing_cfg_file or "").rpartition("/")[0]
        if not key:
            return None
    elif isinstance(_cause(error), MissingMandatoryValue):
        return None  # that something is missing is no word's fault
    else:
        key = _key(error) or _quoted_group(error)
    candidates = [word for word in arguments if "=" in word and not word.startswith("-")]
    exact = [word for word in candidates if override_name(word) == key]
    inside = [word for word in candidates if key and (override_name(word) + ".").startswith(key + ".")]
    return next(iter([*exact, *inside]), None)


def override_name(override: str) -> str:
    """The setting or group that a word of the command line is about."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _cause(error: Exception) -> BaseException | None:
    return error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__


def _key(error: Exception) -> str:
    return getattr(_cause(error), "full_key", None) or ""


def _quoted_group(error: Exception) -> str:
    """Hydra names a group only in its text: Could not override 'clustr'."""
    return str(error).partition("'")[2].partition("'")[0].partition("@")[0]


def _explain_several(word: str) -> str:
    name, _, values = word.partition("=")
    told = f"{word}: several values are a run for each, and need -m: `prorl-hpc launch -m {word} …`"
    if name in groups() or "(" in values:  # range(1,3) and the like
        return told
    return f"{told}. A list is written {name}=[{values}], a text with a comma in quotes: '{name}=\"{values}\"'"


def _explain_choice(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or "?"
    group, _, choice = str(missing).rpartition("/")
    options = sorted(str(option) for option in error.options or [])
    near = difflib.get_close_matches(choice, options, n=1, cutoff=0.4)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    make = f"; {how_to_make(group)}" if group == "latency" else ""
    return f"{group}={choice}: there is no such choice; {hint}choices of {group}: {', '.join(options) or 'none'}{make}"


def _explain_key(key: str) -> str:
    """An unknown setting, with the nearest known ones."""
    parent = key.rpartition(".")[0]
    known = list(setting_names(ProrlConfig()))
    if key.startswith("policies."):
        known += setting_names(PolicyConfig(), f"policies.{key.split('.')[1]}.")
    last = key.rpartition(".")[2]
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    near = [f"{parent}.{name}" for name in difflib.get_close_matches(last, beside, n=2, cutoff=0.7)] if parent else []
    near = near or ([] if parent else difflib.get_close_matches(key, groups(), n=1, cutoff=0.7))
    near = near or difflib.get_close_matches(key, [name for name in known if "." in name], n=2, cutoff=0.8)
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


def takes_any_name(override: str) -> bool:
    """Whether a word of the command line is about a dictionary, such as engine.env, or an entry of one."""
    name = override_name(override)
    return any(name == taker or name.startswith(f"{taker}.") for taker in _open_dicts())


@cache
def _open_dicts() -> tuple[str, ...]:
    config = ProrlConfig()

    def value_at(name: str) -> Any:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return tuple(name for name in setting_names(config) if isinstance(value_at(name), dict))
