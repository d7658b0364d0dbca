"""Composes the configuration with Hydra, and turns its errors into one sentence each; all of them are told at once.

Hydra stays what its users know: overrides, groups, ``--cfg job``, ``--multirun``, ``--config-dir``.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from prorl_hpc.cli.composition_choices import check_choices
from prorl_hpc.cli.composition_errors import blamed_override, explain_all, override_name, takes_any_name
from prorl_hpc.cli.composition_files import check_not_empty
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import conf_dir, register, to_config, user_conf_dirs
from prorl_hpc.messages.errors import ConfigError

_COMMON = ("--cfg", "--resolve", "--package", "--run", "--multirun", "--config-dir", "--config-name", "--hydra-help")
_RARE = ("--info", "--config-path", "--experimental-rerun", "--help", "--version", "--shell-completion")
FLAGS = (*_COMMON, *_RARE)
"""Hydra's own."""
_SHORT = ("-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i")
_WITH_VALUE: tuple[str, ...] = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
)
_WITH_VALUE += ("--experimental-rerun",)
_PRINTING = ("--cfg", "-c", "job", "hydra", "all", "--info", "-i", "--hydra-help", "--resolve")
_MOST_ERRORS = 30


@dataclass(frozen=True)
class Composed:
    """One configuration to run, and the overrides that made it."""

    config: ProrlConfig
    overrides: list[str]
    own_files: dict[str, Path] = field(default_factory=dict)
    """Group → the file of the user's that was chosen of it."""

    def with_file(self, error: str) -> str:
        """``error`` with the file's name, if it begins with a setting that such a file sets, and no override does."""
        setting = error.partition(":")[0].partition("=")[0].partition(" ")[0]
        path = self.own_files.get(setting.partition(".")[0])
        if path is None or setting in map(override_name, self.overrides):
            return error
        loaded = OmegaConf.load(path)
        inside = [setting.partition(".")[2], setting]  # of its group's package, or of the global one
        return f"{path}: {error}" if any(OmegaConf.select(loaded, name) is not None for name in inside) else error


def compose_all(arguments: list[str], own_flags: tuple[str, ...] = ()) -> list[Composed]:
    """What Hydra makes of the command line: one entry, several with ``--multirun``, none after ``--cfg`` and its like,
    which print. Raises ConfigError that tells all that is wrong; ``own_flags`` are those of the verb."""
    _check_flags(arguments, own_flags)
    _check_directories(arguments)
    left, errors, own_dir = _flags_first(arguments), list[str](), _config_dir(arguments)
    check_choices(arguments, own_dir)
    for _ in range(_MOST_ERRORS):
        try:
            composed = _compose(left)
        except (HydraException, OmegaConfBaseException, MissingConfigException, YAMLError, UnicodeDecodeError) as error:
            errors += explain_all(error, own_dir)
            blamed = blamed_override(error, left, own_dir)
            if blamed is None:
                break
            left.remove(blamed)  # what else is wrong shows without it
            left = [word for word in left if word not in _PRINTING]
            continue
        if not errors:
            return composed
        break
    told = list(dict.fromkeys(errors))
    if len(told) == 1:
        raise ConfigError(told[0])
    raise ConfigError(f"{len(told)} things are wrong:" + "".join(f"\n  - {error}" for error in told))


def _compose(arguments: list[str]) -> list[Composed]:
    found: list[Composed] = []

    def keep(composed: DictConfig) -> None:
        overrides = HydraConfig.get().overrides.task
        words = [word.removeprefix("++") if takes_any_name(word) else word for word in overrides]
        found.append(Composed(_typed(composed), words, _own_files(_config_dir(arguments))))

    as_given = {_for_hydra(word): word for word in arguments}
    register()
    decorated = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(keep)
    try:
        with _command_line(arguments):
            decorated()
    except OverrideParseException as error:
        error.override = as_given.get(error.override, error.override)
        raise
    for composed in found:
        check_not_empty(composed.own_files)
    return found


def _own_files(own_dir: Path | None) -> dict[str, Path]:
    choices = {str(group): str(choice) for group, choice in HydraConfig.get().runtime.choices.items()}
    roots = [*([own_dir] if own_dir else []), *user_conf_dirs()]
    files = {group: [root / group / f"{choice}.yaml" for root in roots] for group, choice in choices.items()}
    return {
        group: next(path for path in paths if path.is_file())
        for group, paths in files.items()
        if any(path.is_file() for path in paths) and not (conf_dir() / group / paths[0].name).is_file()
    }


@contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """``sys.argv`` as Hydra shall see it. It lets exceptions out, instead of printing them and exiting."""
    words = [_for_hydra(word) for word in arguments]
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if {"-m", "--multirun"} & {*arguments}:
            with tempfile.TemporaryDirectory(
                prefix="prorl-sweep-"
            ) as sweep:  # for a record of Hydra's that nobody needs
                sys.argv = ["prorl-hpc launch", *words, f"hydra.sweep.dir={sweep}"]
                yield
        else:
            sys.argv = ["prorl-hpc launch", *words]
            yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _for_hydra(word: str) -> str:
    """A new entry of a setting that takes any name is for Hydra one that must be added."""
    return (
        f"++{word}" if "=" in word and override_name(word) == word.partition("=")[0] and takes_any_name(word) else word
    )


def _flags_first(arguments: list[str]) -> list[str]:
    """Hydra's parser takes no flag between overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        (flags if word.startswith("-") else overrides).append(word)
        if word in _WITH_VALUE:
            flags += [value for value in [next(words, None)] if value is not None]
    return [*flags, *overrides]


def _typed(composed: DictConfig) -> ProrlConfig:
    """By way of plain values, for OmegaConf lets `+trainer.typo=1` into a node that is typed already."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return to_config({str(key): value for key, value in values.items()})


def _check_flags(arguments: list[str], own_flags: tuple[str, ...]) -> None:
    """Hydra would print its usage, and take ``--dry`` for whatever it likes. Raises ConfigError."""
    known = [*own_flags, *FLAGS]
    for word in arguments:
        flag = word.partition("=")[0]
        if not flag.startswith("-") or flag in known or flag in _SHORT:
            continue
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        near = near or [name for name in known if flag == name.replace("-", "") or name.startswith(flag)][:1]
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no flag {flag}; {hint}flags: {', '.join(sorted(known))}")


def _check_directories(arguments: list[str]) -> None:
    """Raises ConfigError for a directory that was named and is not there; warns of choices that ours hide."""
    for word in filter(None, os.environ.get("PRORL_CONF_DIR", "").split(":")):
        if not Path(word).expanduser().is_dir():
            raise ConfigError(
                f"PRORL_CONF_DIR={word}: there is no such directory; it holds cluster/NAME.yaml and the like"
            )
    given = _config_dir(arguments)
    if given is not None and not given.is_dir():
        raise ConfigError(f"--config-dir {given}: there is no such directory; it holds cluster/NAME.yaml and the like")
    for root in [*([given] if given else []), *user_conf_dirs()]:
        for path in sorted(root.glob("*/*.yaml")):
            if (conf_dir() / path.relative_to(root)).is_file():
                print(
                    f"warning: {path} is not used, since {path.parent.name}={path.stem} is ours: rename it",
                    file=sys.stderr,
                )


def _config_dir(arguments: list[str]) -> Path | None:
    """What ``--config-dir`` names."""
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            value = value if equals else "".join(arguments[i + 1 : i + 2])
            return Path(value).absolute()
    return None


def show_help(arguments: list[str]) -> None:
    """``--help``, much sooner than by Hydra's own, which asks every directory anew for every group. Raises
    ConfigError."""
    from prorl_hpc.cli.launch_help import help_text

    words = [word for word in arguments if word not in ("--help", "-h")]
    composed = compose_all(words)
    print(help_text(composed[0].config if composed else ProrlConfig(), _config_dir(words)))
