"""Requests that the transformers engine advances together, and how it samples their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from prorl_hpc.inference.stop_text import StopText
from prorl_hpc.inference.version_spans import spans_of
from prorl_hpc.messages.inference import Completion, FinishReason
from prorl_hpc.messages.rollout import SamplingParams


def uncancellable() -> Future[Any]:
    """A future that a waiting coroutine's cancellation leaves alone, so that the thread may always set it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class Request:
    """One generation under way. ``ended`` is set by the event loop: aborted, or nobody waits any more."""

    token_ids: list[int]
    sampling: SamplingParams
    priority: int
    random: torch.Generator
    stop_ids: frozenset[int]
    max_tokens: int
    stop_text: StopText
    result: Future[Completion] = field(default_factory=uncancellable)
    ended: bool = False
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take one sampled token; says whether it was the last."""
        self.out.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids or self.stop_text.ends(self.out):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.out) >= self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        if not self.result.done():
            self.result.set_result(Completion(self.out, self.logprobs, reason, spans_of(self.versions)))


@dataclass
class Cohort:
    """Requests that advance together; row i of every tensor is ``requests[i]``."""

    requests: list[Request]
    inputs: torch.Tensor
    mask: torch.Tensor
    cache: DynamicCache = field(default_factory=DynamicCache)

    @classmethod
    def of(cls, requests: list[Request], device: torch.device) -> Cohort:
        longest = max(len(r.token_ids) for r in requests)
        pads = [longest - len(r.token_ids) for r in requests]
        ids = [[0] * pad + r.token_ids for pad, r in zip(pads, requests, strict=True)]
        mask = [[0] * pad + [1] * len(r.token_ids) for pad, r in zip(pads, requests, strict=True)]
        return cls(requests, torch.tensor(ids, device=device), torch.tensor(mask, device=device))

    def keep(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Go on with these rows and their new tokens, shape (rows before,)."""
        index = torch.tensor(rows, device=self.mask.device)
        if len(rows) < len(self.requests):
            self.cache.batch_select_indices(index)
            self.requests = [self.requests[row] for row in rows]
        self.inputs = tokens[index, None]
        self.mask = torch.cat([self.mask[index], torch.ones_like(self.inputs)], dim=1)


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs, shapes (B,), under each row's temperature and top_p; logits (B, V).

    Temperature 0 takes the likeliest token and reports its logprob at temperature 1, as vLLM does. Each row
    draws one number from its own generator, so its tokens do not depend on who shares the batch."""
    device = logits.device
    temperatures = torch.tensor([r.sampling.temperature for r in requests], device=device)
    greedy = temperatures < 1e-5
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    top_p = torch.tensor([r.sampling.top_p for r in requests], device=device, dtype=torch.double)
    if bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        cut = (before >= top_p[:, None]).scatter(-1, order, before >= top_p[:, None])
        scaled = scaled.masked_fill(cut & ~greedy[:, None], -torch.inf)
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    draws = torch.cat([torch.rand(1, generator=r.random, dtype=torch.double) for r in requests]).to(device)
    drawn = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    tokens = torch.where(greedy, scaled.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
