"""Between Hydra's DictConfig, our dataclasses and YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from prorl_hpc.config.schema import ProrlConfig


def conf_dir() -> Path:
    """The directory of YAML groups: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register_schema() -> None:
    """Make ProrlConfig known to Hydra as ``prorl_schema``, so that it refuses unknown keys and wrong types."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="prorl_schema", node=ProrlConfig)


def to_config(composed: DictConfig | dict[str, Any]) -> ProrlConfig:
    """Merge over the schema and return plain dataclasses; OmegaConf's errors name the key."""
    merged = OmegaConf.merge(OmegaConf.structured(ProrlConfig), composed)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ProrlConfig)
    return config


def compose(overrides: list[str] | None = None) -> ProrlConfig:
    """Compose ``conf/config.yaml`` with Hydra overrides, as ``launch`` does."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register_schema()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        composed = hydra_compose(config_name="config", overrides=overrides or [])
    return to_config(composed)


def save(config: ProrlConfig, path: Path) -> None:
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def load(path: Path) -> ProrlConfig:
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return to_config(loaded)
