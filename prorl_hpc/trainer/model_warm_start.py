"""The supervised start of the tiny model, in three phases that make it quick.

Short prompts first: in a context of 60 tokens two layers find the file's name and the digits to copy within 200
steps, in one of 350 they hardly begin to. Then the full prompts of the task. Last the demonstrations of
an imperfect teacher: what is left to learn is which command a question wants, and the reward can teach that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.trainer.model_demonstrations import Demonstration, Demonstrations

BATCH_SIZE = 16
LEARNING_RATE = 5e-3
RIGHT_SHARE = 0.4
"""How often the imperfect teacher is right, and so about the success rate that the model starts with."""


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    right_share: float
    with_examples: bool


PHASES = (
    Phase("short prompts", 220, 1.0, False),
    Phase("full prompts", 160, 1.0, True),
    Phase("imperfect demonstrations", 120, RIGHT_SHARE, True),
)


def warm_start(
    model: Any, chat: ChatFormat, progress: Callable[[str], None], phases: Sequence[Phase] = PHASES, seed: int = 0
) -> float:
    """Train ``model`` in place; returns the mean probability with which it writes a right rollout."""
    demonstrations = Demonstrations(chat, seed)
    prefix = demonstrations.prefix
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(phase.steps for phase in phases)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, total))
    model.train()
    for phase in phases:
        progress(f"warm start: {phase.steps} steps on {phase.name}")
        for _ in range(phase.steps):
            batch = [
                demonstrations.draw(phase.right_share, with_examples=phase.with_examples) for _ in range(BATCH_SIZE)
            ]
            logprobs, _ = token_logprobs(model, batch, prefix if phase.with_examples else [])
            (-logprobs.mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right = right_probability(model, Demonstrations(chat, seed + 1))
    progress(f"the model writes the right rollout with probability {right:.2f}")
    return right


def right_probability(model: Any, demonstrations: Demonstrations, count: int = 64) -> float:
    """Mean probability, at temperature 1, of exactly the right commands and answers: a lower bound of the success rate."""
    batch = [demonstrations.draw_right() for _ in range(count)]
    with torch.no_grad():
        logprobs, owner = token_logprobs(model, batch, demonstrations.prefix)
    per_rollout = torch.zeros(count).index_add_(0, owner, logprobs)
    return float(per_rollout.exp().mean())


def token_logprobs(model: Any, batch: Sequence[Demonstration], prefix: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all trained tokens (N) and the demonstration that each belongs to (N).

    The shared ``prefix`` runs through the model once, gradient included."""
    start, width = len(prefix), max(len(demonstration.token_ids) for demonstration in batch)
    ids = torch.tensor([d.token_ids[start:] + [0] * (width - len(d.token_ids)) for d in batch])
    trained = torch.tensor([d.trained[start:] + [False] * (width - len(d.token_ids)) for d in batch])
    cache = None
    if prefix:
        cache = model.model(input_ids=torch.tensor([list(prefix)]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(batch))
    # Padding is on the right, so causal attention alone keeps it out.
    hidden = model.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=bool(prefix)).last_hidden_state
    chosen = trained[:, 1:]
    logits = model.lm_head(hidden[chosen]).float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][chosen][:, None])[:, 0]
    return logprobs, chosen.nonzero()[:, 0]


def _learning_rate_factor(step: int, total: int, warmup: int = 30) -> float:
    """Linear warm-up, then linear decay to a tenth."""
    return min(1.0, (step + 1) / warmup) * (1.0 - 0.9 * step / max(1, total))
