"""Every setting of the trainer takes effect or is refused by name, with the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.config.validation import allowed_words, validate


def errors_of(**trainer: Any) -> list[str]:
    config = ProrlConfig()
    config.model.prepare = "tiny"
    config.trainer = dataclasses.replace(config.trainer, **trainer)
    return validate(config)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"advantage": "gea"},
            "trainer.advantage=gea: must be one of group, group_mean, leave_one_out, batch, gae; did",
        ),
        ({"policy_loss": "clp"}, "; did you mean clip?"),
        ({"aggregation": "token-mean"}, "; did you mean token_mean?"),
        ({"proximal": "policy"}, "trainer.proximal=policy: must be one of engine, trainer"),
        ({"correction": "truncated", "proximal": "trainer"}, "; did you mean truncate?"),
        ({"offload": "cpu"}, "trainer.offload=cpu: must be one of none, optimizer, all"),
        ({"publish": "nccl"}, "trainer.publish=nccl: must be one of disk, direct"),
        ({"wandb": "on"}, "trainer.wandb=on: must be one of off, offline, online (in a file within quotes"),
        ({"dtype": "float16"}, "trainer.dtype=float16: must be one of auto, float32, bfloat16; did you mean"),
        ({"clip_low": 0.0}, "trainer.clip_low=0.0: must be greater than 0 and at most 1 (which is no lower clip)"),
        ({"clip_low": 1.5}, "trainer.clip_low=1.5"),
        ({"clip_high": 0.0}, "trainer.clip_high=0.0: must be greater than 0"),
        ({"dual_clip": 1.0}, "trainer.dual_clip=1.0: must be 0 (off), or greater than 1"),
        ({"kl_coefficient": -0.1}, "trainer.kl_coefficient=-0.1: must be 0 or more"),
        ({"entropy_coefficient": float("nan")}, "trainer.entropy_coefficient=nan: must be finite, and 0 or more"),
        ({"probe_tolerance": float("inf")}, "trainer.probe_tolerance=inf: must be finite, and 0 or more"),
        ({"advantage": "gae", "gae_gamma": 1.1}, "trainer.gae_gamma=1.1: must be greater than 0 and at most 1"),
        ({"advantage": "gae", "gae_lambda": -0.1}, "trainer.gae_lambda=-0.1: must be 0 to 1"),
        ({"advantage": "gae", "value_coefficient": 0.0}, "trainer.value_coefficient=0.0: must be greater than 0"),
        (
            {"correction": "mask", "proximal": "trainer", "correction_cap": 0.5},
            "trainer.correction_cap=0.5: must be at",
        ),
        ({"mini_batches": 0}, "trainer.mini_batches=0: must be at least 1"),
        ({"epochs": 0}, "trainer.epochs=0: must be at least 1"),
        ({"staleness": -1}, "trainer.staleness=-1: must be 0 or more"),
        ({"keep_checkpoints": 0}, "trainer.keep_checkpoints=0: must be at least 1"),
        ({"zero_stage": 4}, "trainer.zero_stage=4: must be 0, 1, 2 or 3"),
        (
            {"mini_batches": 3},
            "trainer.mini_batches=3 does not divide trainer.groups_per_step=4, whose groups stay whole: ",
        ),
        ({"group_size": 0}, "trainer.group_size=0: must be at least 1"),
        ({"group_size": 1, "advantage": "batch"}, "must be at least 2 with trainer.advantage=batch"),
        ({"group_size": 1, "advantage": "gae"}, "set trainer.dynamic_sampling=false"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "task.max_turns × task.max_turn_tokens"),
        ({"when_full": "carry", "max_parallel_groups": 6}, "trainer.when_full=carry with trainer.staleness=0"),
        ({"top_p": 0.9}, "trainer.top_p=0.9: must be 1"),
        ({"wandb": "offline", "wandb_project": " "}, "trainer.wandb_project is empty"),
        ({"warmup_steps": 16}, "trainer.warmup_steps=16 is not less than trainer.steps=16: "),
        ({"warmup_steps": 1}, "trainer.warmup_steps=1 has no effect"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], told: str) -> None:
    errors = errors_of(**settings)
    assert len(errors) == 1 and told in errors[0], errors


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"gae_gamma": 0.9},
            "trainer.gae_gamma=0.9 has no effect with trainer.advantage=group: set trainer.advantage=gae",
        ),
        ({"gae_lambda": 0.95, "advantage": "batch"}, "with trainer.advantage=batch"),
        ({"value_coefficient": 0.1}, "or leave trainer.value_coefficient at 0.5"),
        ({"value_clip": 0.0}, "trainer.value_clip=0 has no effect"),
        ({"value_learning_rate": 1e-4}, "trainer.value_learning_rate=0.0001 has no effect"),
        ({"dual_clip": 3.0, "policy_loss": "cispo"}, "set trainer.policy_loss=clip, or leave trainer.dual_clip at 0"),
        (
            {"dual_clip": 3.0, "proximal": "trainer"},
            "trainer.dual_clip=3 has no effect with trainer.proximal=trainer and one update per step",
        ),
        ({"aggregation_tokens": 100}, "set trainer.aggregation=seq_mean_token_sum_norm"),
        ({"correction": "truncate"}, "trainer.correction=truncate has no effect with trainer.proximal=engine: set "),
        ({"correction_cap": 3.0}, "trainer.correction_cap=3 has no effect with trainer.correction=none"),
        ({"kl_model": "/m"}, "set trainer.kl_coefficient greater than 0, or leave trainer.kl_model empty"),
        ({"max_response_tokens": 100}, "trainer.max_response_tokens=100 has no effect"),
        ({"overlong_filtering": False, "overlong_finishes": ["context"]}, "trainer.overlong_finishes=[context] has no"),
        ({"eval_prompts": 0, "eval_every": 5}, "trainer.eval_every=5 has no effect with trainer.eval_prompts=0: set "),
        ({"wandb_project": "mine"}, "set trainer.wandb=offline or online, or leave trainer.wandb_project at prorl"),
    ],
)
def test_what_would_have_no_effect_is_refused(settings: dict[str, Any], told: str) -> None:
    errors = errors_of(**settings)
    assert len(errors) == 1 and told in errors[0], errors


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "gae", "group_size": 1, "dynamic_sampling": False, "gae_gamma": 0.99, "value_clip": 0.0},
        {"proximal": "trainer", "correction": "sequence_mask", "correction_cap": 3.0},
        {"proximal": "engine", "mini_batches": 4, "epochs": 3},
        {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        {"aggregation": "seq_mean_token_sum_norm", "aggregation_tokens": 80},
        {"kl_coefficient": 0.1, "kl_model": "/m"},
        {"dual_clip": 3.0},
        {"dual_clip": 3.0, "proximal": "trainer", "epochs": 2},
        {"warmup_steps": 15},
        {"eval_prompts": 0},
        {"when_full": "carry", "max_parallel_groups": 6, "staleness": 1},
        {"wandb": "offline", "wandb_project": "mine"},
        {"overlong_filtering": False, "overlong_finishes": []},
        {"soft_overlong_cache_tokens": 10, "max_response_tokens": 60},
    ],
)
def test_what_goes_together(settings: dict[str, Any]) -> None:
    assert errors_of(**settings) == []


def test_a_word_that_does_not_exist_is_told_alone() -> None:
    assert len(errors_of(advantage="gea", gae_lambda=0.9, group_size=1)) == 1
    assert len(errors_of(policy_loss="clp", dual_clip=3.0)) == 1


def test_nothing_is_said_where_no_trainer_runs() -> None:
    assert errors_of(enabled=False, gae_lambda=0.9, mini_batches=3) == []


def test_words_can_be_completed() -> None:
    assert allowed_words("trainer.proximal") == ["engine", "trainer"]
    assert allowed_words("trainer.zero_stage") == [] == allowed_words("trainer.steps")


def test_each_setting_has_a_rule_or_takes_anything() -> None:
    """A new setting is not forgotten here."""
    from prorl_hpc.config.trainer_validation import TRAINER_RULES

    ruled = {name.removeprefix("trainer.") for _, names in TRAINER_RULES for name in names.split()}
    free = ["adam_betas", "deepspeed", "deepspeed_file", "kl_model", "overlong_finishes", "wandb_project"]
    for field in dataclasses.fields(TrainerConfig):
        assert field.type == "bool" or field.name in ruled or field.name in free, field.name
