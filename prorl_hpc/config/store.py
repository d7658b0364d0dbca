"""Between Hydra's DictConfig, our dataclasses and YAML files.

Every process of a run loads the composed file. It does so without OmegaConf, whose import takes longer than all the rest of
a supervisor's start; there is nothing left to interpolate in it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_hpc.config.schema import ProrlConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


def conf_dir() -> Path:
    """The directory of YAML groups: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def user_conf_dirs() -> list[Path]:
    """Directories of groups beside ours: those of $PRORL_CONF_DIR (a site's, a user's; colons between), then
    ``~/.config/prorl_hpc/conf``. They hold ``cluster/mysite.yaml`` and the like; only those that exist."""
    named = [Path(word).expanduser() for word in os.environ.get("PRORL_CONF_DIR", "").split(":") if word]
    return [path.absolute() for path in dict.fromkeys([*named, _home_conf_dir()]) if path.is_dir()]


def own_conf_dir() -> Path:
    """Where a file of the user's goes to be found by every launch: the first of ``user_conf_dirs``, or the one to be made."""
    return next(iter(user_conf_dirs()), _home_conf_dir().absolute())


def _home_conf_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "prorl_hpc" / "conf"


def register() -> None:
    """Make ProrlConfig known to Hydra as ``prorl_schema``, so that it refuses unknown keys and wrong types, put the user's
    directories on its search path, and have ``${product:…,…}`` multiply in our YAML."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from omegaconf import OmegaConf

    class UserDirectories(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for path in user_conf_dirs():
                search_path.append(provider="user", path=f"file://{path}")

    OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
    ConfigStore.instance().store(name="prorl_schema", node=_Composable)
    known = Plugins.instance().discover(SearchPathPlugin)
    if all(plugin.__name__ != UserDirectories.__name__ for plugin in known):
        Plugins.instance().register(UserDirectories)


@dataclasses.dataclass
class _Composable(ProrlConfig):
    """What is composed: OmegaConf adds entries to a dictionary of dataclasses from no command line. ``to_config`` checks
    them against the schema."""

    policies: dict[str, Any] = dataclasses.field(default_factory=dict)


def to_config(composed: DictConfig | dict[str, Any]) -> ProrlConfig:
    """Merge over the schema and return plain dataclasses; OmegaConf's errors name the key."""
    from omegaconf import OmegaConf

    plain = (
        OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        if OmegaConf.is_config(composed)
        else composed
    )
    merged = OmegaConf.merge(OmegaConf.structured(ProrlConfig), plain)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ProrlConfig)
    return config


def compose(overrides: list[str] | None = None) -> ProrlConfig:
    """Compose ``conf/config.yaml`` with Hydra overrides, as ``launch`` does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        composed = hydra_compose(config_name="config", overrides=overrides or [])
    return to_config(composed)


def save(config: ProrlConfig, path: Path) -> None:
    """Values as they are: ``${…}`` in a shell line is the shell's."""
    path.write_bytes(msgspec.yaml.encode(config))


def load(path: Path) -> ProrlConfig:
    """A file that ``save`` wrote. Raises ValueError naming the file and the key that cannot be."""
    try:
        loaded = msgspec.yaml.decode(path.read_bytes())
        _check_keys(loaded, ProrlConfig, "")
        return msgspec.convert(loaded, ProrlConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not the configuration of a run: {error}") from error


def _check_keys(loaded: Any, kind: type, where: str) -> None:
    """DecodeError for the first one that a dataclass does not have, which msgspec would leave out."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in loaded.items() if isinstance(loaded, dict) else ():
        if key not in fields:
            raise msgspec.DecodeError(f"there is no setting {where}{key}")
        default = fields[key].default_factory
        if isinstance(default, type) and dataclasses.is_dataclass(default):
            _check_keys(value, default, f"{where}{key}.")
