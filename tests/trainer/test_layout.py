from __future__ import annotations

import random

import pytest
import torch

from prorl_hpc.trainer.batches import Sample
from prorl_hpc.trainer.layout import collate, dummy_row, make_rows, micro_batches, share_out, visibility


def sample(group: str, number: int, prompt: list[int], own: list[int], mask: list[bool] | None = None) -> Sample:
    mask = mask or [True] * len(own)
    logprobs = [0.0] * len(prompt) + [-float(t) if m else 0.0 for t, m in zip(own, mask, strict=True)]
    return Sample(
        f"{group}.s{number}", group, prompt + own, [False] * len(prompt) + mask, logprobs, number + 1.0, weight=0.5
    )


def samples(groups: int = 3, size: int = 4) -> list[Sample]:
    draw = random.Random(0)
    return [
        sample(f"g{g}", s, [g + 1] * (5 + g), [draw.randrange(9, 99) for _ in range(draw.randrange(1, 12))])
        for g in range(groups)
        for s in range(size)
    ]


def trained(rows):
    return sorted((t, lp, a) for r in rows for t, lp, a in zip(r.targets, r.engine_logprobs, r.advantages, strict=True))


def test_a_shared_prompt_is_there_once():
    (row,) = make_rows([sample("g", 0, [1, 2], [5, 6]), sample("g", 1, [1, 2], [7])], 100, share_prompts=True)
    assert row.token_ids == [1, 2, 5, 6, 7]
    assert row.positions == [0, 1, 2, 3, 2]
    assert row.parts == [0, 0, 1, 1, 2]
    assert row.sources == [1, 2, 1]
    assert row.targets == [5, 6, 7]
    assert row.engine_logprobs == [-5, -6, -7]


def test_tokens_between_turns_are_seen_but_not_trained():
    (row,) = make_rows([sample("g", 0, [1, 2], [5, 6, 7], [True, False, True])], 100, share_prompts=True)
    assert (row.sources, row.targets) == ([1, 3], [5, 7])


def test_a_beginning_that_somebody_trains_is_not_shared():
    rows = make_rows([sample("g", 0, [1, 2, 3], [5]), sample("g", 1, [1, 2], [3, 5])], 100, share_prompts=True)
    assert [r.parts for r in rows] == [[0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 20, 64, 1000])
def test_every_trained_token_is_there_once_whatever_the_budget(budget, share):
    rows = make_rows(samples(), budget, share_prompts=share)
    assert trained(rows) == trained(make_rows(samples(), 10**6, share_prompts=False))
    batches = micro_batches(rows, budget)
    assert sum(map(len, batches)) == len(rows)
    assert all(len(b) * max(map(len, b)) <= budget or len(b) == 1 for b in batches)
    if budget >= 64:
        assert max(map(len, rows)) <= budget


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_get_equally_many_micro_batches_and_nothing_is_lost(world):
    batches = micro_batches(make_rows(samples(), 30, share_prompts=True), 30)
    ranks = share_out(batches, world)
    assert len({len(mine) for mine in ranks}) == 1
    rows = [row for mine in ranks for batch in mine for row in batch]
    assert trained([r for r in rows if any(r.weights)]) == trained(make_rows(samples(), 30, share_prompts=True))


def test_a_dummy_counts_nothing():
    micro = collate([dummy_row()])
    assert micro.weights.tolist() == [0.0]


def test_who_sees_whom():
    visible = visibility(torch.tensor([[0, 0, 1, 2, -1]]))[0].int().tolist()
    assert visible == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
