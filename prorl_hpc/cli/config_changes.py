"""Changes of a run's stored settings when it is resumed: single settings, typed and named as in launch, and which of
them would make what is recorded of open orders wrong."""

from __future__ import annotations

import re
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError

HARMLESS = (
    *("cluster", "run", "engine"),
    *("sandbox.start_limit", "sandbox.start_timeout_s", "sandbox.start_retries", "sandbox.warm"),
    *("sandbox.copy_images", "sandbox.unpack_images"),
    *(f"rollout.{pool}_slots" for pool in ("init", "ready", "run", "eval")),
    *("rollout.workers_per_node", "rollout.balancing", "rollout.when_server_lost", "rollout.drain_s"),
    *("rollout.abort_cancelled",),
    *("rollout.heartbeat_s", "rollout.lost_after_s", "rollout.http_tcp", "rollout.http_port"),
    *("rollout.keep_trajectories",),
    "trainer",
)
"""Settings, or whole groups, that decide neither what is ordered of the rollout service nor what its results are:
where and how fast it runs, for how long, how often it saves and evaluates, how the trainer learns from what comes."""
_FIXED = {"run.root": "the run stays in its directory", "run.name": "the run keeps its name"}
EXCEPTIONS = (
    *("run.seed", "engine.kind", "engine.dtype", "engine.outside"),
    *("trainer.enabled", "trainer.groups_per_step", "trainer.group_size", "trainer.max_rows_per_step"),
    *("trainer.max_parallel_groups", "trainer.dynamic_sampling", "trainer.when_full"),
    *("trainer.temperature", "trainer.top_p"),
)
"""In those groups the exceptions; of the trainer, what its orders say (trainer.orders)."""


def with_overrides(config: ProrlConfig, words: list[str]) -> tuple[ProrlConfig, list[str]]:
    """``config`` with those of the ``name=value`` words, as Hydra writes them, that can be; and what is wrong with the
    others, so that all of it can be told at once."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from prorl_hpc.cli.composition_errors import explain

    plain = _literal(asdict(config))
    changed, errors = OmegaConf.merge(OmegaConf.structured(ProrlConfig), plain), list[str]()
    assert isinstance(changed, DictConfig)
    parser = OverridesParser.create()
    for word in sorted(words, key=lambda word: "." in word.partition("=")[0]):  # groups before what changes them
        try:
            (parsed,) = parser.parse_overrides([word])
            if parsed.is_sweep_override():
                raise ConfigError(f"{word}: a run has one value of each setting; give one")
            _apply(changed, parsed.key_or_group, parsed.value(), word, delete=parsed.is_delete())
        except (HydraException, OmegaConfBaseException) as error:
            errors.append(explain(error))
        except ConfigError as error:
            errors.append(str(error))
    values = OmegaConf.to_container(changed, resolve=True)
    return msgspec.convert(values, ProrlConfig), errors


def _literal(value: Any) -> Any:
    """``value`` so that OmegaConf gives it back as it is: a stored ``${…}`` is a shell's."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [_literal(each) for each in value]
    return {key: _literal(each) for key, each in value.items()} if isinstance(value, dict) else value


def _apply(config: DictConfig, key: str, value: Any, word: str, *, delete: bool) -> None:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if not isinstance(node, DictConfig):
        OmegaConf.update(config, key, value)  # there is no such setting, and OmegaConf says so
        raise ConfigError(f"{word}: {parent} is a single value")
    if last in node and is_dataclass(_type_of(node[last])):
        config[key] = _group(config, key, value, word)
        return
    if key in _FIXED:
        raise ConfigError(f"{word}: {_FIXED[key]}; leave it out, or launch a new run")
    is_open = _type_of(node) is dict
    if delete:
        if not is_open or last not in node:
            raise ConfigError(f"{word}: only entries of open settings, such as engine.env, can be taken out")
        with open_dict(node):
            del node[last]
    elif is_open and last not in node:
        with open_dict(node):
            node[last] = value
    else:
        OmegaConf.update(config, key, value, merge=False)


def _group(config: DictConfig, key: str, value: Any, word: str) -> Any:
    """What the file ``key``/``value`` sets, over the defaults: as in launch, in place of all that the run has there; of
    the trainer, in place of the pieces of its algorithm alone."""
    from prorl_hpc.cli.composition import compose_all
    from prorl_hpc.cli.preset_pieces import pieces_of

    if "." in key or key == "run" or not isinstance(value, str):
        raise ConfigError(
            f"{word}: {key} has settings of its own: {', '.join(map(str, OmegaConf.select(config, key)))}"
        )
    (composed,) = compose_all([f"{key}={value}"])
    if key == "trainer":
        return OmegaConf.merge(config.trainer, pieces_of(value))
    return OmegaConf.structured(getattr(composed.config, key))


def _type_of(node: Any) -> Any:
    return OmegaConf.get_type(node) if OmegaConf.is_config(node) else type(node)


def changed_settings(old: ProrlConfig, new: ProrlConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names of all settings that differ, with both values."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def needs_fresh(name: str) -> bool:
    """Whether what is recorded of open orders is worth nothing any more when that setting changes."""
    if name in EXCEPTIONS:
        return True
    return not any(name == harmless or name.startswith(f"{harmless}.") for harmless in HARMLESS)


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        found += _flat(value, f"{prefix}{entry.name}.") if is_dataclass(value) else [(prefix + entry.name, value)]
    return found
