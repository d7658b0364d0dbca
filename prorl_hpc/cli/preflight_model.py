"""Whether the models are such as can be trained and served, as this run wants it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.chat_thinking import CHOICES as THINKING
from prorl_hpc.config.model_directory import check_model_dir, hub_hint, prepared_model
from prorl_hpc.config.policies import model_setting, models_of
from prorl_hpc.config.schema import ModelConfig, ProrlConfig
from prorl_hpc.config.tool_validation import TOOL_FORMAT_NAMES
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.trainer.model_recipes import RECIPES, is_prepared

_SETTING = re.compile(r"(?<![\w./])model\.(path|prepare|thinking|tool_format)\b")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "num_heads")


def model_problems(config: ProrlConfig) -> Iterator[str]:
    """Of every policy's model, each as a sentence with its cure."""
    for policy, model in models_of(config).items():
        yield from _problems_of(config, model_setting(policy), model)


def _problems_of(config: ProrlConfig, setting: str, model: ModelConfig) -> Iterator[str]:
    if model.path:
        path = Path(model.path).expanduser().absolute()
    elif not model.prepare:
        return
    elif model.prepare not in RECIPES:
        yield f"{setting}.prepare={model.prepare} is no recipe; recipes: {', '.join(sorted(RECIPES))}"
        return
    elif is_prepared(model.prepare):
        path = prepared_model(model.prepare)
    else:
        return
    thinking, tools = _allowed(model.thinking, THINKING), _allowed(model.tool_format, TOOL_FORMAT_NAMES)
    weights = config.trainer.enabled or config.engine.kind != "scripted"  # else nobody reads any
    wrong = check_model(path, thinking, tools, weights=weights)
    hint = "" if path.exists() else hub_hint(f"{setting}.path", model.path)
    yield from (named_for(setting, error) + hint for error in wrong)
    if not wrong:
        yield from _fits(config, setting, model, path)


def _allowed(value: str, allowed: tuple[str, ...]) -> str:
    """Of a word that does not exist, the validation tells."""
    return value if value in allowed else "auto"


def named_for(setting: str, error: str) -> str:
    """An error of one model, with the name of the settings that are its own: ``model``, ``policies.NAME.model``."""
    named = _SETTING.sub(rf"{setting}.\1", error)
    return named if _SETTING.search(error) and named.startswith(setting) else f"{setting}: {named}"


def check_model(path: Path, thinking: str = "auto", tool_format: str = "auto", *, weights: bool = True) -> list[str]:
    """Whether a model directory has what a run needs: ``weights``, tokenizer and a chat template that can be extended, and
    that does what ``model.thinking`` and ``model.tool_format`` ask."""
    try:
        check_model_dir(path, weights=weights)
    except ValueError as error:
        return [str(error)]
    try:
        ChatFormat.open(path, thinking=thinking, tool_format=tool_format)
    except ConfigError as error:
        return [str(error)]
    return []


def _fits(config: ProrlConfig, setting: str, model: ModelConfig, path: Path) -> Iterator[str]:
    """The model's own limits against the settings."""
    try:
        own = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        return
    wanted, parallel = model.max_context_tokens, config.engine.tensor_parallel
    longest, heads = _longest(own), _first(own, _HEADS)
    if longest and wanted > longest:
        yield (
            f"{setting}.max_context_tokens={wanted}: {path} was made for at most {longest} tokens (its config.json): set it to "
            f"{longest} or less"
        )
    if heads and heads % parallel:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield (
            f"engine.tensor_parallel={parallel} does not divide the {heads} attention heads of {path}: use one of {fitting}"
        )


def _longest(own: dict[str, Any]) -> int:
    """Tokens that the model's positions reach, scaled ones too; 0 if it does not say."""
    length = _first(own, _LENGTHS)
    text = own.get("text_config") if isinstance(own.get("text_config"), dict) else own
    scaling = (text or own).get("rope_scaling") or {}
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
    return int(length * max(1, factor)) if isinstance(factor, int | float) else length


def _first(own: dict[str, Any], names: tuple[str, ...]) -> int:
    """The first of ``names`` that the model's configuration has, in its text part where it has parts."""
    text = own.get("text_config")
    for place in (text, own):
        for name in names:
            if isinstance(place, dict) and isinstance(place.get(name), int):
                return int(place[name])
    return 0
