"""Group ``trainer``: values that cannot be, settings that would have no effect, and settings that do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prorl_hpc.config.deepspeed_json import deepspeed_problems
from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.config.setting_rules import AT_LEAST_1, FRACTION, NOT_NEGATIVE, POSITIVE, Check, one_of

_CHOICES: dict[str, tuple[str, ...]] = {
    "when_full": ("cancel", "carry"),
    "advantage": ("group", "group_mean", "leave_one_out", "batch", "gae"),
    "policy_loss": ("clip", "sequence_clip", "cispo"),
    "aggregation": ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"),
    "proximal": ("engine", "trainer"),
    "correction": ("none", "truncate", "mask", "sequence_truncate", "sequence_mask"),
    "dtype": ("auto", "float32", "bfloat16"),
    "offload": ("none", "optimizer", "all"),
    "publish": ("disk", "direct"),
    "wandb": ("off", "offline", "online"),
}
TRAINER_RULES: list[tuple[Check, str]] = [
    *((one_of(*words), f"trainer.{name}") for name, words in _CHOICES.items()),
    (POSITIVE, "trainer.learning_rate trainer.max_grad_norm trainer.temperature trainer.eval_temperature"),
    (POSITIVE, "trainer.clip_high trainer.value_coefficient trainer.value_learning_rate"),
    (AT_LEAST_1, "trainer.steps trainer.groups_per_step trainer.group_size trainer.max_rows_per_step"),
    (AT_LEAST_1, "trainer.mini_batches trainer.epochs trainer.ranks_per_node trainer.threads"),
    (AT_LEAST_1, "trainer.micro_batch_tokens trainer.checkpoint_every trainer.keep_checkpoints"),
    (AT_LEAST_1, "trainer.eval_samples trainer.correction_cap"),
    (
        NOT_NEGATIVE,
        "trainer.max_parallel_groups trainer.weight_decay trainer.warmup_steps trainer.eval_every trainer.eval_prompts",
    ),
    (NOT_NEGATIVE, "trainer.soft_overlong_cache_tokens trainer.max_response_tokens trainer.aggregation_tokens"),
    (NOT_NEGATIVE, "trainer.kl_coefficient trainer.entropy_coefficient trainer.value_clip trainer.staleness"),
    (NOT_NEGATIVE, "trainer.probe_tolerance"),
    (FRACTION, "trainer.top_p trainer.gae_gamma"),
    ((lambda v: 0 <= v <= 1, "0 to 1"), "trainer.gae_lambda"),
    ((lambda v: 0 < v <= 1, "greater than 0 and at most 1 (which is no lower clip)"), "trainer.clip_low"),
    ((lambda v: v == 0 or v > 1, "0 (off), or greater than 1"), "trainer.dual_clip"),
    ((lambda v: v in (0, 1, 2, 3), "0, 1, 2 or 3"), "trainer.zero_stage"),
]
"""What each setting may be by itself."""


@dataclass(frozen=True)
class _Effect:
    """``settings`` do something only where setting ``of`` fulfils ``when``; ``cure`` is how to have it so."""

    settings: str
    of: str
    when: Callable[[Any], bool]
    cure: str


_EFFECTS = [
    _Effect("gae_gamma gae_lambda", "advantage", lambda v: v == "gae", "trainer.advantage=gae"),
    _Effect("value_coefficient value_clip", "advantage", lambda v: v == "gae", "trainer.advantage=gae"),
    _Effect("value_learning_rate", "advantage", lambda v: v == "gae", "trainer.advantage=gae"),
    _Effect("dual_clip", "policy_loss", lambda v: v == "clip", "trainer.policy_loss=clip"),
    _Effect(
        "aggregation_tokens",
        "aggregation",
        lambda v: v == "seq_mean_token_sum_norm",
        "trainer.aggregation=seq_mean_token_sum_norm",
    ),
    _Effect("correction", "proximal", lambda v: v == "trainer", "trainer.proximal=trainer"),
    _Effect("correction_cap", "correction", lambda v: v != "none", "trainer.correction=truncate or another"),
    _Effect("kl_model", "kl_coefficient", lambda v: v > 0, "trainer.kl_coefficient greater than 0"),
    _Effect("overlong_finishes", "overlong_filtering", bool, "trainer.overlong_filtering=true"),
    _Effect(
        "max_response_tokens",
        "soft_overlong_cache_tokens",
        lambda v: v > 0,
        "trainer.soft_overlong_cache_tokens greater than 0",
    ),
    _Effect("eval_every eval_samples", "eval_prompts", lambda v: v > 0, "trainer.eval_prompts greater than 0"),
    _Effect("eval_temperature", "eval_prompts", lambda v: v > 0, "trainer.eval_prompts greater than 0"),
    _Effect("wandb_project", "wandb", lambda v: v != "off", "trainer.wandb=offline or online"),
]


def trainer_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence. Nothing is said where no trainer runs, nor of what follows from a word that does not exist."""
    if not config.trainer.enabled:
        return
    for check in (_effects, _groups, _batch_sizes, _optimizer, _losses, _overlong, _watching):
        yield from check(config.trainer)
    yield from _prompts(config)
    yield from deepspeed_problems(config.trainer)


def _effects(trainer: TrainerConfig) -> Iterator[str]:
    plain = TrainerConfig()
    for effect in _EFFECTS:
        condition = getattr(trainer, effect.of)
        if not _exists(effect.of, condition) or effect.when(condition):
            continue
        for name in effect.settings.split():
            value, default = getattr(trainer, name), getattr(plain, name)
            if value not in (default, []):  # an empty list asks for nothing
                yield (
                    f"trainer.{name}={_shown(value)} has no effect with trainer.{effect.of}={_shown(condition)}: set "
                    f"{effect.cure}, or leave trainer.{name} {f'at {_shown(default)}' if default != '' else 'empty'}"
                )


def _exists(name: str, value: object) -> bool:
    return name not in _CHOICES or value in _CHOICES[name]


def _shown(value: object) -> str:
    """As it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _groups(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.group_size == 1 and trainer.advantage != "gae" and _exists("advantage", trainer.advantage):
        yield (
            f"trainer.group_size=1: must be at least 2 with trainer.advantage={trainer.advantage}, for an advantage is "
            "relative to a group; trainer.advantage=gae has a value head in its place"
        )
    if trainer.group_size == 1 and trainer.advantage == "gae" and trainer.dynamic_sampling:
        yield (
            "trainer.group_size=1 with trainer.dynamic_sampling=true: a group of one has equal rewards, so each would be "
            "dropped and no step filled: set trainer.dynamic_sampling=false"
        )
    if trainer.max_rows_per_step < trainer.groups_per_step:
        yield (
            f"trainer.max_rows_per_step={trainer.max_rows_per_step} is less than trainer.groups_per_step="
            f"{trainer.groups_per_step}: a step could never be filled"
        )
    if trainer.when_full == "carry" and trainer.max_parallel_groups <= trainer.groups_per_step:
        yield (
            f"trainer.when_full=carry needs spare groups in flight: trainer.max_parallel_groups="
            f"{trainer.max_parallel_groups} must be greater than trainer.groups_per_step={trainer.groups_per_step}"
        )
    if trainer.when_full == "carry" and trainer.staleness == 0:
        yield (
            "trainer.when_full=carry with trainer.staleness=0: a group that goes on into the next step was begun by older "
            "weights, and none of those is trained on: set trainer.staleness=1 or more, or trainer.when_full=cancel"
        )


def _batch_sizes(trainer: TrainerConfig) -> Iterator[str]:
    groups, parts = trainer.groups_per_step, trainer.mini_batches
    if parts > 1 and groups > 0 and groups % parts:
        fitting = ", ".join(str(n) for n in range(1, min(groups, 1_000) + 1) if groups % n == 0)
        yield (
            f"trainer.mini_batches={parts} does not divide trainer.groups_per_step={groups}, whose groups stay whole: use "
            f"one of {fitting}, or another number of groups"
        )


def _optimizer(trainer: TrainerConfig) -> Iterator[str]:
    if len(trainer.adam_betas) != 2 or not all(0 <= beta < 1 for beta in trainer.adam_betas):
        yield f"trainer.adam_betas={trainer.adam_betas}: must be two numbers, each at least 0 and less than 1"
    if 0 < trainer.steps <= trainer.warmup_steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} is not less than trainer.steps={trainer.steps}: the rate would only "
            f"rise, up to the last step, and no step after that has trainer.learning_rate={trainer.learning_rate:g}. Give fewer of them, or more steps"
        )
    if trainer.warmup_steps == 1:
        yield (
            "trainer.warmup_steps=1 has no effect: the first step has the whole trainer.learning_rate, as with 0. Give 2 or "
            "more, or 0"
        )


def _losses(trainer: TrainerConfig) -> Iterator[str]:
    if 0 < trainer.top_p < 1:
        yield (
            f"trainer.top_p={trainer.top_p}: must be 1, since the policy gradient does not train the truncated "
            "distribution that a smaller one samples from"
        )
    if trainer.dual_clip and trainer.proximal == "trainer" and trainer.mini_batches * trainer.epochs == 1:
        yield (
            f"trainer.dual_clip={trainer.dual_clip:g} has no effect with trainer.proximal=trainer and one update per step, whose ratios "
            "are all 1: set trainer.mini_batches or trainer.epochs greater than 1, or leave trainer.dual_clip at 0"
        )
    if trainer.aggregation == "seq_mean_token_sum_norm" and trainer.aggregation_tokens == 0:
        yield (
            "trainer.aggregation=seq_mean_token_sum_norm divides by trainer.aggregation_tokens, which is 0: set it to the "
            "most tokens that a rollout can have, task.max_turns × task.max_turn_tokens"
        )


def _overlong(trainer: TrainerConfig) -> Iterator[str]:
    cache, longest = trainer.soft_overlong_cache_tokens, trainer.max_response_tokens
    if cache > 0 and longest <= cache:
        yield (
            f"trainer.max_response_tokens={longest} must be greater than trainer.soft_overlong_cache_tokens={cache} "
            "(0 switches the soft overlong punishment off)"
        )


def _watching(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.wandb != "off" and not trainer.wandb_project.strip():
        yield f"trainer.wandb_project is empty: name the project that trainer.wandb={trainer.wandb} writes to"


def _prompts(config: ProrlConfig) -> Iterator[str]:
    trainer, train = config.trainer, config.task.train
    if trainer.groups_per_step > train.size and not train.path:
        yield (
            f"trainer.groups_per_step={trainer.groups_per_step} needs more prompts than task.train.size={train.size} has"
        )
