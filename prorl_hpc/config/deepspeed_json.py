"""A user's own DeepSpeed JSON (``trainer.deepspeed_file``, and ``trainer.deepspeed`` over it), and what it may say.

DeepSpeed itself ignores keys at the top level that it does not know, and this trainer decides some that it does know. Both are
refused here, by name, and so are unknown keys within sections (deepspeed_keys): a line in that file either takes effect or stops the launch. The value "auto", which the files of other
trainers are full of, means: as the settings of ``trainer`` have it. No DeepSpeed is loaded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prorl_hpc.config.deepspeed_keys import LENIENT, RECORDED, STRICT
from prorl_hpc.config.deepspeed_optimizers import optimizer_problems
from prorl_hpc.config.trainer_schema import TrainerConfig

TAKES_EFFECT = frozenset(
    [
        "aio",
        "bf16",
        "comms_logger",
        "communication_data_type",
        "data_types",
        "dump_state",
        "flops_profiler",
        "gradient_clipping",
        "gradient_predivide_factor",
        "log_level",
        "memory_breakdown",
        "optimizer",
        "prescale_gradients",
        "steps_per_print",
        "timers",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)
"""Top-level keys of DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/) that mean something to this trainer."""
_BATCH = "the trainer cuts each step into micro-batches of trainer.micro_batch_tokens tokens"
_METRICS = "metrics go to metrics.jsonl and TensorBoard, and with trainer.wandb to Weights & Biases"
DECIDED_HERE = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "scheduler": "the learning rate is trainer.learning_rate with trainer.warmup_steps",
    "fp16": "the trainer computes in trainer.dtype, which float16 is not one of",
    "amp": "the trainer computes in trainer.dtype",
    "torch_autocast": "the trainer computes in trainer.dtype",
    "activation_checkpointing": "set trainer.gradient_checkpointing, which works with every Hugging Face model",
    "tensorboard": _METRICS,
    "wandb": _METRICS,
    "csv_monitor": _METRICS,
    "comet": _METRICS,
    "checkpoint": "checkpoints are the trainer's own: trainer.checkpoint_every, trainer.keep_checkpoints",
    "gradient_allreduce_op": "gradients are averaged over the ranks, and the losses scaled to that",
}
"""Keys that DeepSpeed knows and this trainer settles otherwise, each with what to do."""


def user_deepspeed(config: TrainerConfig) -> dict[str, Any]:
    """What the user's JSON says, ``trainer.deepspeed`` over ``trainer.deepspeed_file``, without what is "auto". Raises ValueError for a
    file that cannot be read or is no JSON object."""
    read: dict[str, Any] = {}
    if config.deepspeed_file:
        read = _read(Path(config.deepspeed_file).expanduser())
    given: dict[str, Any] = _without_auto(merged(read, config.deepspeed))
    return given


def deepspeed_problems(config: TrainerConfig) -> Iterator[str]:
    """One sentence for each thing in the user's JSON that would not take effect."""
    try:
        given = user_deepspeed(config)
    except ValueError as error:
        yield str(error)
        return
    where = _where(config)
    yield from _ignored(given, where)
    yield from _contradictions(given, config, where)
    if isinstance(optimizer := given.get("optimizer"), dict):
        yield from optimizer_problems(optimizer, config, where)
    if config.offload == "optimizer" and config.zero_stage < 1:
        yield "trainer.offload=optimizer needs trainer.zero_stage=1, 2 or 3, for ZeRO is what offloads"
    if config.offload == "all" and config.zero_stage != 3:
        yield f"trainer.offload=all needs trainer.zero_stage=3, got {config.zero_stage}: only then are weights in parts that can come and go"


def _contradictions(given: dict[str, Any], config: TrainerConfig, where: str) -> Iterator[str]:
    for keys, name, wanted in _said_twice(config):
        found = _at(given, keys)
        if found is not None and found != wanted:
            yield f"{where}: {'.'.join(keys)}={found!r} contradicts trainer.{name}={wanted!r}: make them equal, or leave one out"
    bf16 = _at(given, ("bf16", "enabled"))
    if bf16 is not None and config.dtype != "auto" and bf16 != (config.dtype == "bfloat16"):
        yield f"{where}: bf16.enabled={bf16!r} contradicts trainer.dtype={config.dtype}: set that alone"
    for section, allowed in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        device = _at(given, ("zero_optimization", section, "device"))
        if device not in (None, "none") and config.offload not in allowed:
            yield (
                f"{where}: zero_optimization.{section}.device={device!r} contradicts trainer.offload={config.offload}: "
                f"set trainer.offload={allowed[0]}"
            )
        if device == "none" and config.offload in allowed:
            yield f"{where}: zero_optimization.{section}.device='none' contradicts trainer.offload={config.offload}"
    for keys in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if _at(given, keys) is False:
            yield f"{where}: {'.'.join(keys)}=False would let a gradient that is not finite into the weights: leave it out"


def _ignored(given: dict[str, Any], where: str) -> Iterator[str]:
    for key, value in given.items():
        if key in DECIDED_HERE:
            yield f"{where}: {key!r} has no effect here: {DECIDED_HERE[key]}. Remove it or set it to 'auto'"
        elif key not in TAKES_EFFECT:
            yield f"{where}: {key!r} would be ignored; {_hint(key, TAKES_EFFECT)}"
        else:
            yield from _unknown(key, value, where)


def _unknown(section: str, value: Any, where: str) -> Iterator[str]:
    """What DeepSpeed does not know in ``section`` or in those within; nothing of keys that hold a single value."""
    known = (STRICT | LENIENT).get(section)
    if known is None or value is None:
        return
    if not isinstance(value, dict):
        yield f"{where}: {section!r} must be an object with keys of its own, got {value!r}"
        return
    for name, inner in value.items():
        if name in known:
            yield from _unknown(f"{section}.{name}", inner, where)
        elif section in LENIENT:
            yield f"{where}: '{section}.{name}' would be ignored; {_hint(name, known)}"
        elif not _deepspeed_may_know_more():
            yield f"{where}: '{section}.{name}' is refused by DeepSpeed, which has no such key; {_hint(name, known)}"


def _deepspeed_may_know_more() -> bool:
    """Whether the one that is installed here is newer than our record; it says itself then, at the start of the trainer."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) > RECORDED


def _hint(key: str, known: frozenset[str]) -> str:
    near = get_close_matches(key, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def _said_twice(config: TrainerConfig) -> list[tuple[tuple[str, ...], str, Any]]:
    """Where in the JSON a setting of ours would stand, its name and its value."""
    return [
        (("zero_optimization", "stage"), "zero_stage", config.zero_stage),
        (("gradient_clipping",), "max_grad_norm", config.max_grad_norm),
        (("optimizer", "params", "lr"), "learning_rate", config.learning_rate),
        (("optimizer", "params", "betas"), "adam_betas", config.adam_betas),
        (("optimizer", "params", "weight_decay"), "weight_decay", config.weight_decay),
    ]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid over it, section by section."""
    both = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def _where(config: TrainerConfig) -> str:
    return " and ".join(f"trainer.{name}" for name in ("deepspeed_file", "deepspeed") if getattr(config, name))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"trainer.deepspeed_file={path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"trainer.deepspeed_file={path} must hold a JSON object, got {type(content).__name__}")
    return content


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(each) for key, each in value.items() if each != "auto"}
    return value


def _at(given: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        given = given.get(key) if isinstance(given, dict) else None
    return given
