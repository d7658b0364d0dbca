"""How samples become tensors: rows with shared prompts, micro-batches under a token budget, equal work per rank.

The samples of a group begin with the same prompt, so a *row* holds the prompt once and the samples' own
parts behind it; positions restart behind the prompt, and a mask lets each part see the prompt and itself
alone. The numbers are those of one row per sample, at a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

from prorl_hpc.trainer.batches import Sample

PROMPT, PADDING = 0, -1
"""Part numbers within a row; the samples' own parts count from 1."""


@dataclass
class Row:
    """Tokens of length T, and for each of N trained tokens: from which place in the row it is predicted, its id,
    the engine's logprob, its advantage, its weight in the loss, the number of its sample within the row, and its reward: the
    sample's at the last token, 0 before."""

    token_ids: list[int]
    positions: list[int]
    parts: list[int]
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """``token_ids``, ``positions``: int64 [B, T]. ``visible``: bool [B, T, T], or None where plain causal attention is
    right. ``sources``: int64 [N], places in the flattened [B·T]; the rest: [N]. ``weights``: 0 in a dummy. ``sequences``:
    int64, number of the token's sample within the micro-batch."""

    token_ids: Tensor
    positions: Tensor
    visible: Tensor | None
    sources: Tensor
    targets: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    rewards: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """What ``Policy.forward`` takes first."""
        return self.token_ids, self.positions, self.visible, self.sources, self.targets


def make_rows(samples: Sequence[Sample], token_budget: int, *, share_prompts: bool) -> list[Row]:
    """Rows of at most ``token_budget`` tokens where samples allow it; one that is longer gets a row of its own."""
    rows = []
    for _, members in groupby(sorted(samples, key=_prompt_of), key=_prompt_of):
        group = list(members)
        if not share_prompts:
            rows += [_row([sample], sample.first_trained) for sample in group]
            continue
        prompt = _shared_prompt(group)
        room = max(1, token_budget - prompt)
        bins = -(-sum(len(s.token_ids) - prompt for s in group) // room)
        rows += [_row(members, prompt) for members in _even_bins(group, bins, prompt, room)]
    return rows


def _prompt_of(sample: Sample) -> tuple[str, int]:
    """Main conversations of a group share their prompt; branches rarely have more than their first words in common with
    them, but perhaps with one another."""
    return sample.group_id, sample.part


def _shared_prompt(group: Sequence[Sample]) -> int:
    """Length of the common beginning that holds no trained token."""
    limit = min(sample.first_trained for sample in group)
    first = group[0].token_ids
    for i in range(limit):
        if any(sample.token_ids[i] != first[i] for sample in group):
            return i
    return limit


def _even_bins(group: Sequence[Sample], bins: int, prompt: int, room: int) -> list[list[Sample]]:
    """Longest first into the emptiest bin; a new bin where none has room."""
    filled: list[list[Sample]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for sample in sorted(group, key=lambda s: (-len(s.token_ids), s.rollout_id)):
        own = len(sample.token_ids) - prompt
        emptiest = loads.index(min(loads))
        if loads[emptiest] and loads[emptiest] + own > room:
            emptiest = len(filled)
            filled.append([])
            loads.append(0)
        filled[emptiest].append(sample)
        loads[emptiest] += own
    return [members for members in filled if members]


def _row(samples: Sequence[Sample], prompt: int) -> Row:
    row = Row(samples[0].token_ids[:prompt], list(range(prompt)), [PROMPT] * prompt)
    for part, sample in enumerate(samples, start=1):
        start, length = len(row), len(sample.token_ids)
        row.token_ids += sample.token_ids[prompt:]
        row.positions += range(prompt, length)
        row.parts += [part] * (length - prompt)
        for t in range(sample.first_trained, length):
            if sample.loss_mask[t]:
                # The token before t: at the prompt's end for the first token of a part, else just before.
                row.sources.append(t - 1 if t - 1 < prompt else start + t - 1 - prompt)
                row.targets.append(sample.token_ids[t])
                row.engine_logprobs.append(sample.logprobs[t])
                row.advantages.append(sample.advantage)
                row.weights.append(sample.weight)
                row.sequences.append(part - 1)
                row.rewards.append(0.0)
        row.rewards[-1] = sample.reward
    return row


def dummy_row() -> Row:
    """Takes part in the collectives of a step and adds nothing."""
    return Row([0, 0], [0, 1], [PROMPT, 1], [0], [0], [0.0], [0.0], [0.0], [0], [0.0])


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[Row]]:
    """Rows sorted by length, cut so that each part's padded size (rows × longest) keeps to ``token_budget``."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def share_out(batches: Sequence[list[Row]], world: int) -> list[list[list[Row]]]:
    """Micro-batches for each of ``world`` ranks, equally many for each (dummies where needed), loads close to even."""
    per_rank = -(-len(batches) // world)
    ranks: list[list[list[Row]]] = [[] for _ in range(world)]
    loads = [0] * world
    for batch in sorted(batches, key=_padded_tokens, reverse=True):
        rank = min((r for r in range(world) if len(ranks[r]) < per_rank), key=lambda r: loads[r])
        ranks[rank].append(batch)
        loads[rank] += _padded_tokens(batch)
    for mine in ranks:
        mine += [[dummy_row()] for _ in range(per_rank - len(mine))]
    return ranks


def _padded_tokens(batch: Sequence[Row]) -> int:
    return len(batch) * max(map(len, batch))


def collate(rows: Sequence[Row], device: torch.device | str = "cpu") -> MicroBatch:
    """Pad to the longest row and move to ``device``."""
    length = max(map(len, rows))

    def padded(lists: Iterable[list[int]], value: int) -> Tensor:
        return torch.tensor([x + [value] * (length - len(x)) for x in lists], dtype=torch.int64, device=device)

    def flat(lists: Iterable[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([x for each in lists for x in each], dtype=dtype, device=device)

    shared = any(max(row.parts) > 1 for row in rows)
    firsts = accumulate((max(r.sequences) + 1 for r in rows[:-1]), initial=0)
    return MicroBatch(
        token_ids=padded((r.token_ids for r in rows), 0),
        positions=padded((r.positions for r in rows), 0)
        if shared
        else torch.arange(length, device=device).repeat(len(rows), 1),
        visible=visibility(padded((r.parts for r in rows), PADDING)) if shared else None,
        sources=flat(([i * length + s for s in r.sources] for i, r in enumerate(rows)), torch.int64),
        targets=flat((r.targets for r in rows), torch.int64),
        engine_logprobs=flat(r.engine_logprobs for r in rows),
        advantages=flat(r.advantages for r in rows),
        weights=flat(r.weights for r in rows),
        sequences=flat(([first + s for s in r.sequences] for first, r in zip(firsts, rows, strict=True)), torch.int64),
        rewards=flat(r.rewards for r in rows),
    )


def visibility(parts: Tensor) -> Tensor:
    """bool [B, T, T] from part numbers [B, T]: token i sees token j ≤ i of the prompt or of its own part. Padding
    sees itself, so that no softmax is empty."""
    length = parts.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=parts.device).tril()
    own = parts[:, :, None] == parts[:, None, :]
    prompt = (parts[:, None, :] == PROMPT) & (parts[:, :, None] != PADDING)
    return (own | prompt) & causal
