"""What a chosen preset of ``trainer`` changes in a run that is there: the pieces of its algorithm, and no sizes.

At launch a preset lies over dapo.yaml, and an experiment's sizes over both. A run that goes on has sizes of its own, and keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.config.store import conf_dir, register, user_conf_dirs
from prorl_hpc.messages.errors import ConfigError

_SIZES = "dapo"
"""The file below all others, which sets the sizes of the default run; its algorithm is what TrainerConfig has by itself."""


def pieces_of(preset: str) -> dict[str, Any]:
    """What ``trainer=PRESET`` comes to, for every setting that one of our presets or this one sets. Values may refer to other
    settings (``${task.max_turns}``); the file is there."""
    register()  # for what our files calculate
    others = [path for path in (conf_dir() / "trainer").glob("*.yaml") if path.stem != _SIZES]
    own = _own(preset)
    names = own.keys() | {name for path in others for name in _own(path.stem)}
    plain = TrainerConfig()
    defaults = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.name in names}
    return defaults | own


def _own(preset: str) -> dict[str, Any]:
    """What the file and those that it builds on set, without dapo.yaml."""
    if preset.removeprefix("/trainer/") == _SIZES:
        return {}
    loaded = OmegaConf.load(_file(preset))
    assert isinstance(loaded, DictConfig)
    content = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(content, dict)
    values = {str(name): value for name, value in content.items()}
    found: dict[str, Any] = {}
    itself = {name: value for name, value in values.items() if name != "defaults"}
    for base in _bases(values):
        found |= itself if base == "_self_" else _own(base)
    return found


def _bases(values: dict[str, Any]) -> Iterator[str]:
    """In the order in which they lie over one another; a file that does not say where it stands itself lies over all."""
    named = [str(base) for base in values.get("defaults") or []]
    yield from named
    if "_self_" not in named:
        yield "_self_"


def _file(preset: str) -> Path:
    """As Hydra finds it: ours before the user's. Raises ConfigError for what a list of defaults may hold and is no name."""
    name = preset.removeprefix("/trainer/")
    files = [root / "trainer" / f"{name}.yaml" for root in (conf_dir(), *user_conf_dirs())]
    found = next((path for path in files if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"trainer: {preset!r} in a list of defaults: resume takes names of files there, [gspo, _self_]"
        )
    return found
