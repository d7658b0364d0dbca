"""The trainer's own answers to the cases of the conformance suite, in the fixtures' form: numbers in lists, no tensors.

Matrices are [B, T]; where the mask is 0 the losses are given NaN, to show that such tokens count nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prorl_hpc.trainer.advantages import (
    GROUP_ADVANTAGES,
    batch_advantages,
    gae,
    soft_overlong_punishment,
    whiten,
)
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, sequence_weights, training_loss

_LEAVES = ("logprobs", "entropy", "values")


def answer(kind: str, settings: dict[str, Any], inputs: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """What the fixtures call ``expected``. ``kind``: loss, advantages, gae or overlong. ``dtype``: float32, as in training, or
    float64."""
    found: dict[str, Any] = _ANSWERS[kind](settings, inputs, getattr(torch, dtype))
    return found


def _loss(settings: dict[str, Any], inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    keep = torch.tensor(inputs["mask"], dtype=torch.bool)
    lengths = keep.sum(-1).tolist()
    weights = sequence_weights(lengths, settings["aggregation"], settings.get("aggregation_tokens", 0))
    tensors = {
        name: torch.where(keep, torch.tensor(numbers, dtype=dtype), math.nan).requires_grad_(name in _LEAVES)
        for name, numbers in inputs.items()
        if name != "mask"
    }
    terms = TokenTerms(
        **{name: tensor.flatten() for name, tensor in tensors.items()},
        weights=(torch.tensor(weights, dtype=dtype)[:, None] * keep).flatten(),
        sequences=torch.arange(len(lengths))[:, None].expand_as(keep).flatten(),
    )
    pieces = {name: x for name, x in settings.items() if not name.startswith("aggregation")}
    loss, _ = training_loss(terms, LossSettings(**pieces))
    loss.backward()
    gradients = {name: _list(tensors[name].grad) for name in _LEAVES if name in tensors}
    return {"loss": loss.item(), "gradients": gradients}


def _advantages(settings: dict[str, Any], inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(inputs["groups"]):
        groups.setdefault(group, []).append(row)
    rewards = [torch.tensor([inputs["rewards"][i] for i in rows], dtype=dtype) for rows in groups.values()]
    if settings["advantage"] == "batch":
        lengths = [[sum(inputs["mask"][i]) for i in rows] for rows in groups.values()]
        found = batch_advantages(rewards, lengths)
    else:
        found = [GROUP_ADVANTAGES[settings["advantage"]](each) for each in rewards]
    in_order = dict(zip((i for rows in groups.values() for i in rows), torch.cat(found).tolist(), strict=True))
    return {"advantages": [in_order[i] for i in range(len(in_order))]}


def _gae(settings: dict[str, Any], inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    keep = torch.tensor(inputs["mask"], dtype=torch.bool)
    rewards, values = (torch.tensor(inputs[name], dtype=dtype)[keep] for name in ("rewards", "values"))
    sequences = torch.arange(len(keep))[:, None].expand_as(keep)[keep]
    advantages, returns = gae(rewards, values, sequences, settings["gae_gamma"], settings["gae_lambda"])
    whole = {"advantages": whiten(advantages), "returns": returns}
    return {name: _list(torch.zeros(keep.shape, dtype=dtype).masked_scatter(keep, x)) for name, x in whole.items()}


def _overlong(settings: dict[str, Any], inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    limits = settings["max_response_tokens"], settings["soft_overlong_cache_tokens"]
    return {"punishments": [soft_overlong_punishment(length, *limits) for length in inputs["lengths"]]}


def _list(tensor: Tensor | None) -> list[Any]:
    if tensor is None:
        raise ValueError("the loss has no gradient where the peer's has one")
    found: list[Any] = tensor.tolist()
    return found


_ANSWERS: dict[str, Callable[[dict[str, Any], dict[str, Any], torch.dtype], dict[str, Any]]] = {
    "loss": _loss,
    "advantages": _advantages,
    "gae": _gae,
    "overlong": _overlong,
}
