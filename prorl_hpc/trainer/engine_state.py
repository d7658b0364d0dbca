"""What a DeepSpeed engine holds, taken out and put back: weights, value head, optimizer. All of it is collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.policy import Policy

_MASTER_WEIGHTS = {"single_partition_of_fp32_groups", "fp32_flat_groups"}
_KIND = "optimizer_type"


def whole_weights(lm: nn.Module, stage: int) -> Iterator[tuple[str, Tensor]]:
    """All weights of ``lm`` under its own names, one at a time; a tied output embedding is left out. Under ZeRO-3 a tensor is valid
    until the next is asked for."""
    from deepspeed import zero

    for name, parameter in lm.named_parameters():  # names a shared parameter once, by its first name
        with zero.GatheredParameters([parameter], enabled=stage == 3):
            yield name, parameter.detach()
    persistent = lm.state_dict().keys() if stage < 3 else _persistent_names(lm)
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield name, buffer


def _persistent_names(lm: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in lm.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def value_head_state(policy: Policy, stage: int) -> dict[str, Tensor]:
    """The value head's weights, whole, in the memory of the CPU; nothing where there is none."""
    from deepspeed import zero

    if policy.value_head is None:
        return {}
    named = dict(policy.value_head.named_parameters(prefix="value_head"))
    with zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named.items()}


def load_value_head_state(policy: Policy, stage: int, state: dict[str, Tensor]) -> None:
    """Put back what ``value_head_state`` gave, into ZeRO's float32 copy too. Raises RunError where ``state`` is not of this head."""
    from deepspeed import zero
    from deepspeed.utils import safe_set_full_fp32_param

    named = {} if policy.value_head is None else dict(policy.value_head.named_parameters(prefix="value_head"))
    if named.keys() != state.keys():
        raise RunError(
            f"the checkpoint holds {sorted(state) or 'no value head'}, this run trains {sorted(named) or 'no value head'}: "
            "resume with the same trainer.advantage (gae has a value head), or start a new run from the checkpoint's model"
        )
    parameters = list(named.values())
    with zero.GatheredParameters(parameters, modifier_rank=0, enabled=stage == 3), torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    if stage > 0:
        for name, parameter in named.items():
            safe_set_full_fp32_param(parameter, state[name].to(parameter.device, torch.float32))


def optimizer_state(optimizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """This rank's part of the optimizer state. In float32 the master weights are left out: they equal the weights."""
    state: dict[str, Any] = dict(optimizer.state_dict())
    if dtype == torch.float32:
        for key in _MASTER_WEIGHTS & state.keys():
            state[key] = []
    return state | {_KIND: _kind(optimizer)}


def load_optimizer_state(optimizer: Any, dtype: torch.dtype, state: dict[str, Any], *, rank: int, world: int) -> None:
    """Restore what ``optimizer_state`` gave to the same rank of as many, under the same ZeRO stage: moments and counts, while
    rates, betas, weight decay and clipping stay those that ``optimizer`` was made with. Raises RunError where ``state`` is
    another optimizer's."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    state = dict(state)
    if (saved := state.pop(_KIND, _kind(optimizer))) != _kind(optimizer):  # earlier versions did not write it
        raise RunError(
            f"the checkpoint holds the state of the optimizer {saved}, and this run has {_kind(optimizer)}: resume with the same "
            "trainer.deepspeed.optimizer (none: torch's AdamW), or start a new run from the checkpoint's model"
        )
    ours = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    clip = getattr(optimizer, "clip_grad", None)
    if isinstance(optimizer, ZeROOptimizer):
        by_rank: list[Any] = [None] * world
        by_rank[rank] = state
        optimizer.load_state_dict(by_rank, load_from_fp32_weights=dtype != torch.float32)
    else:
        optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, ours, strict=True):
        group.update(settings)
    if clip is not None:
        optimizer.clip_grad = clip


def _kind(optimizer: Any) -> str:
    """The type of the optimizer itself, whatever DeepSpeed has wrapped it in."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__
