"""From the settings of ``trainer`` to DeepSpeed's: its JSON, and the optimizer that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from prorl_hpc.config.deepspeed_json import deepspeed_problems, merged, user_deepspeed
from prorl_hpc.config.deepspeed_optimizers import optimizer_parameters
from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import ConfigError


def choose_dtype(name: str) -> torch.dtype:
    """``auto``: bfloat16 on a GPU, float32 without one."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ConfigError(f"trainer.dtype={name}: choose auto, {' or '.join(known)}")
    return known[name]


def deepspeed_config(config: TrainerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed JSON of these settings, with the user's own merged over it. Raises ConfigError for whatever in that would be
    ignored or contradicts a setting."""
    if problems := list(deepspeed_problems(config)):
        raise ConfigError("\n".join(problems))
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero_section(config),
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW does offloaded state too: DeepSpeed's own would be compiled at start, for a minute and more.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 1_000_000_000,
    }
    given = user_deepspeed(config)
    both = merged(made, given)
    if both["bf16"]["enabled"] != (dtype == torch.bfloat16):
        raise ConfigError(
            f"bf16.enabled={both['bf16']['enabled']} in the DeepSpeed JSON, but trainer.dtype={config.dtype} is {dtype} on this machine"
        )
    if "optimizer" in both:
        section = both["optimizer"]
        # torch_adam: DeepSpeed's own Adam would be compiled at the start, too.
        ours = _adam_arguments(config) | {"torch_adam": True}
        ours = {name: x for name, x in ours.items() if name in (optimizer_parameters(section["type"]) or ())}
        both["optimizer"] = section | {"params": ours | section.get("params", {})}
    if given:
        _check_sections(both)
    return both


def _check_sections(settings: dict[str, Any]) -> None:
    """Have DeepSpeed read them once, so that what it refuses is told before a model is loaded, and in words."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(deepcopy(settings))
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"DeepSpeed refuses trainer.deepspeed or trainer.deepspeed_file: {found}") from error
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"DeepSpeed refuses trainer.deepspeed or trainer.deepspeed_file: {error}") from error


def zero_section(config: TrainerConfig) -> dict[str, Any]:
    """``zero_optimization`` without the user's own."""
    zero: dict[str, Any] = {"stage": config.zero_stage}
    gpu = torch.cuda.is_available()
    if not gpu:
        # The defaults reserve gigabytes of buckets.
        zero |= {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000, "overlap_comm": False}
    on_cpu = {"device": "cpu", "pin_memory": gpu}
    if config.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = dict(on_cpu)
    if config.offload == "all":
        zero["offload_param"] = dict(on_cpu)
    return zero


def _adam_arguments(config: TrainerConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": list(config.adam_betas), "weight_decay": config.weight_decay}


def parameter_groups(policy: nn.Module, head: nn.Module | None, config: TrainerConfig) -> list[dict[str, Any]]:
    """The model's parameters, and those of the value ``head`` with a learning rate of their own."""
    own = {id(p) for p in head.parameters()} if head is not None else set()
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.parameters() if id(p) not in own]}]
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": config.value_learning_rate})
    return groups


def own_optimizer(groups: Iterable[dict[str, Any]], config: TrainerConfig) -> torch.optim.Optimizer:
    """torch's fused AdamW: the optimizer where the user's JSON names none."""
    arguments = _adam_arguments(config)
    return torch.optim.AdamW(list(groups), **(arguments | {"betas": tuple(config.adam_betas)}), fused=True)


def set_learning_rate(optimizer: Any, rate: float, config: TrainerConfig) -> None:
    """``rate`` for the model; the value head's, the second group, follows the same schedule from its own peak."""
    model, *head = optimizer.param_groups
    model["lr"] = rate
    for group in head:
        group["lr"] = config.value_learning_rate * rate / config.learning_rate
