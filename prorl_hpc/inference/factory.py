"""Which engine a run uses, and how it is made. Looking costs nothing: no engine is imported until it is made."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_hpc.config.parallel import server_gpus_on_node
from prorl_hpc.config.policies import local_index, model_setting, models_of, policy_of_server
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, ProrlConfig
from prorl_hpc.config.script_settings import script_settings
from prorl_hpc.inference.accelerators import gpus_of_server
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.server_group import ServerGroup
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.transport.addresses import node_address

if TYPE_CHECKING:
    from prorl_hpc.inference.vllm_group import GroupMember
    from prorl_hpc.inference.vllm_settings import VllmSettings

KINDS = ("auto", "vllm", "transformers", "scripted")
_NEEDS = {"vllm": ("vllm",), "transformers": ("torch", "transformers", "safetensors"), "scripted": ()}
_EXTRA = {"vllm": "vllm", "transformers": "train"}


def available_engines() -> list[str]:
    """The kinds whose packages this environment has, best first."""
    return [kind for kind, needs in _NEEDS.items() if all(importlib.util.find_spec(name) for name in needs)]


def resolve_engine(kind: str) -> str:
    """The engine that ``engine.kind`` means here. ConfigError says what to install."""
    if kind not in KINDS:
        raise ConfigError(f"engine.kind={kind} is unknown; known are {', '.join(KINDS)}")
    available = available_engines()
    if kind == "auto":
        real = [found for found in available if found != "scripted"]
        if not real:
            raise ConfigError(
                "no engine is installed: pip install 'prorl_hpc[vllm]' (vLLM), or pip install 'prorl_hpc[train]' "
                "(torch and transformers), in the environment of the inference nodes"
            )
        return real[0]
    if kind not in available:
        raise ConfigError(f"engine.kind={kind} is not installed: pip install 'prorl_hpc[{_EXTRA[kind]}]'")
    return kind


def make_engine(config: ProrlConfig, run: RunDirectory, runtime_dir: Path, name: str, index: int) -> Engine:
    """The engine of inference process ``name``, the ``index``-th of the run; not started. ConfigError."""
    kind = resolve_engine(config.engine.kind)
    policy = policy_of_server(config, index)
    model = models_of(config)[policy]
    model_path = Path(model.path)
    if kind == "scripted":
        return _make_scripted(config, model_path)
    if not (model_path / "config.json").is_file():
        told = f"{model_setting(policy)}.path={model.path or '(empty)'}"
        raise ConfigError(f"{told} is not a Hugging Face model directory")
    if kind == "transformers":
        from prorl_hpc.inference.transformers_engine import TransformersEngine

        gpu = local_index(config, index)
        secret = run.weight_secret_file
        return TransformersEngine(model_path, config.engine, model.max_context_tokens, gpu=gpu, weight_secret=secret)
    return _make_vllm(config, run, runtime_dir, name, index, model)


def _make_scripted(config: ProrlConfig, model_path: Path) -> Engine:
    from prorl_hpc.inference.script import script_of
    from prorl_hpc.inference.scripted_engine import ScriptedEngine

    try:
        settings = script_settings(config.engine.script)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return ScriptedEngine(script_of(settings, model_path), settings, model_path)


def _make_vllm(
    config: ProrlConfig, run: RunDirectory, runtime_dir: Path, name: str, index: int, model: ModelConfig
) -> Engine:
    from prorl_hpc.inference.vllm_engine import VllmEngine
    from prorl_hpc.inference.vllm_group import LeaderProcess
    from prorl_hpc.inference.vllm_process import VllmProcess

    settings = _vllm_settings(config, run, runtime_dir, name, index, model)
    log = run.process_log(f"{name}-vllm")
    make: Callable[[], VllmProcess] = functools.partial(VllmProcess, settings, log)
    if config.engine.nodes_per_server > 1:
        group = ServerGroup(run.state, name, config.engine.nodes_per_server)
        address = node_address(config.cluster.interface)
        make = functools.partial(LeaderProcess, settings, log, group, address, config.rollout.lost_after_s)
    return VllmEngine(make, name, model.max_context_tokens, restarts=config.engine.restarts)


def make_member(
    config: ProrlConfig, run: RunDirectory, runtime_dir: Path, name: str, index: int, rank: int
) -> GroupMember:
    """The part of LLM server ``index`` on its node ``rank``, 1 or more, of engine.nodes_per_server. ConfigError."""
    from prorl_hpc.inference.vllm_group import GroupMember

    if resolve_engine(config.engine.kind) != "vllm":
        raise ConfigError("engine.nodes_per_server: only engine.kind=vllm serves a model from several nodes")
    model = models_of(config)[policy_of_server(config, index)]
    settings = _vllm_settings(config, run, runtime_dir, name, index, model)
    group = ServerGroup(run.state, f"inference-{index}", config.engine.nodes_per_server)
    return GroupMember(settings, run.process_log(f"{name}-vllm"), group, rank)


def _vllm_settings(
    config: ProrlConfig, run: RunDirectory, runtime_dir: Path, name: str, index: int, model: ModelConfig
) -> VllmSettings:
    from prorl_hpc.inference.vllm_settings import VllmSettings

    return VllmSettings(
        engine=config.engine,
        model_path=Path(model.path),
        max_context_tokens=model.max_context_tokens,
        socket=runtime_dir / f"{name}-vllm.sock",
        cache_dir=runtime_dir / f"{name}-cache",
        gpus=gpus_of_server(local_index(config, index), server_gpus_on_node(config)),
        weight_secret=run.weight_secret_file,
    )
