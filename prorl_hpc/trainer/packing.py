"""Shared-prefix packing: the samples of one prompt in one row, the prompt computed once.

The G samples of a group begin with the same P prompt tokens. A row holds the prompt once and then each
sample's own tokens; positions restart after the prompt, and a token sees the prompt and its own sample
only. Attention in the prompt is causal, so its states do not depend on what follows: log-probabilities
and gradients are exactly those of G separate rows, for P + G·L tokens instead of G·(P + L).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROMPT = 0
"""Segment of the shared prompt; sample k has segment k + 1; padding has segment -1."""


@dataclass(frozen=True)
class PackedRow:
    """One row. ``tokens``, ``positions``, ``segments``: int64 [T]. For each of the row's N trained tokens:
    ``sources`` int64 [N] (the place in the row whose output predicts it), ``targets`` int64 [N] (its id),
    ``samples`` int64 [N] (index into the samples given to ``pack``) and ``offsets`` int64 [N] (its place
    in that sample)."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    samples: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return int(self.tokens.numel())


def shared_prefix(samples: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> int:
    """Length of the longest prefix that all samples share and in which nobody trains a token."""
    limit = min(next((i for i, trained in enumerate(mask) if trained), len(mask)) for mask in masks)
    first = samples[0]
    for i in range(limit):
        if any(sample[i] != first[i] for sample in samples):
            return i
    return limit


def pack(samples: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], numbers: Sequence[int]) -> PackedRow:
    """Pack samples of one group. ``samples``: token ids, length T_k each; ``masks``: true where the policy
    generated the token, same lengths; ``numbers``: what ``PackedRow.samples`` calls them. A first token can
    not be trained (nothing predicts it): ValueError."""
    if any(mask and mask[0] for mask in masks):
        raise ValueError("the first token of a sample is marked as generated, but nothing predicts it")
    prefix = shared_prefix(samples, masks)
    tokens = list(samples[0][:prefix])
    positions = list(range(prefix))
    segments = [PROMPT] * prefix
    sources, targets, owners, offsets = [], [], [], []
    for k, (sample, mask, number) in enumerate(zip(samples, masks, numbers, strict=True)):
        start = len(tokens)
        tokens += sample[prefix:]
        positions += range(prefix, len(sample))
        segments += [k + 1] * (len(sample) - prefix)
        for i in range(prefix, len(sample)):
            if mask[i]:
                sources.append(prefix - 1 if i == prefix else start + i - prefix - 1)
                targets.append(sample[i])
                owners.append(number)
                offsets.append(i)
    columns = (tokens, positions, segments, sources, targets, owners, offsets)
    return PackedRow(*(torch.tensor(column, dtype=torch.int64) for column in columns))


@dataclass(frozen=True)
class PackedBatch:
    """Rows padded to one length: ``tokens``, ``positions`` int64 [B, T]; ``visible`` bool [B, 1, T, T] (query,
    key); ``rows``, ``sources``, ``targets``, ``samples``, ``offsets`` int64 [N] for all trained tokens."""

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    rows: Tensor
    sources: Tensor
    targets: Tensor
    samples: Tensor
    offsets: Tensor


def collate(rows: Sequence[PackedRow]) -> PackedBatch:
    """Pad rows to the longest; padding sees only itself (a row of the softmax must not be empty)."""

    def padded(name: str, fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(r, name) for r in rows], batch_first=True, padding_value=fill)

    segments = padded("segments", -1)
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    visible = causal & ((key == query) | (key == PROMPT)) & (key >= 0) | torch.eye(length, dtype=torch.bool)
    return PackedBatch(
        tokens=padded("tokens", 0),
        positions=padded("positions", 0),
        visible=visible[:, None],
        rows=torch.cat([torch.full_like(r.sources, i) for i, r in enumerate(rows)]),
        sources=torch.cat([r.sources for r in rows]),
        targets=torch.cat([r.targets for r in rows]),
        samples=torch.cat([r.samples for r in rows]),
        offsets=torch.cat([r.offsets for r in rows]),
    )
