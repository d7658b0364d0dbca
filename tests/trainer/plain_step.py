"""One training step the plain way: a Hugging Face model, one sample after the other, whole logits, SGD. No DeepSpeed, no rows, no
micro-batches, no pass without gradient; the losses alone are those of the package, which have tests of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainer_samples import training_samples

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer.advantages import gae, whiten
from prorl_hpc.trainer.batches import Sample
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, training_loss

MOMENTUM = 0.9
LEARNING_RATE = 0.01
SGD = {"optimizer": {"type": "SGD", "params": {"momentum": MOMENTUM}}}
"""Adam would make of a rounding error in a gradient that is nearly 0 a whole step."""

PIECES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"aggregation": "seq_mean_token_mean", "kl_coefficient": 0.1},
    "gspo": {"policy_loss": "sequence_clip", "aggregation": "seq_mean_token_mean", "proximal": "trainer", "epochs": 2},
    "cispo": {"policy_loss": "cispo", "proximal": "trainer", "correction": "truncate", "mini_batches": 3},
    "dr_grpo": {
        "aggregation": "seq_mean_token_sum_norm",
        "aggregation_tokens": 20,
        "proximal": "trainer",
        "correction": "sequence_mask",
    },
    "rloo": {
        "aggregation": "seq_mean_token_sum",
        "proximal": "trainer",
        "correction": "mask",
        "entropy_coefficient": 0.02,
        "temperature": 0.8,
    },
    "ppo": {
        "advantage": "gae",
        "gae_lambda": 0.9,
        "gae_gamma": 0.99,
        "proximal": "trainer",
        "correction": "sequence_truncate",
        "value_learning_rate": 0.05,
        "mini_batches": 3,
        "epochs": 2,
        "dual_clip": 3.0,
    },
}
"""Every choice of advantage that the engine sees, policy loss, aggregation, correction and extra term at least once."""


def config_of(piece: str, **more: Any) -> TrainerConfig:
    same = {"threads": 1, "max_grad_norm": 1e9, "dtype": "float32", "learning_rate": LEARNING_RATE, "deepspeed": SGD}
    return TrainerConfig(**(same | PIECES[piece] | more))


@dataclass
class _Model:
    lm: nn.Module
    head: nn.Linear
    temperature: float

    def terms(self, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs, entropies and values of the trained tokens."""
        ids = torch.tensor(sample.token_ids)
        hidden = self.lm.base_model(ids[None]).last_hidden_state[0, :-1]
        log_p = (self.lm.lm_head(hidden) / self.temperature).log_softmax(-1)
        keep = torch.tensor(sample.loss_mask)[1:]
        chosen = log_p.gather(-1, ids[1:, None])[:, 0]
        return chosen[keep], -(log_p.exp() * log_p).sum(-1)[keep], self.head(hidden)[:, 0][keep]


def plain_step(model: Path, reference: Path, config: TrainerConfig) -> dict[str, Tensor]:
    """SGD's momentum of every weight after the whole step: Σ_k 0.9^(n−k) g_k of its n updates."""
    from transformers import AutoModelForCausalLM

    lm, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, reference))
    head = nn.Linear(lm.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    now, held_to = _Model(lm, head, config.temperature), _Model(other, head, config.temperature)
    batch = training_samples(settings=config)
    with torch.no_grad():
        old = {s.rollout_id: now.terms(s) for s in batch.samples}
        anchors = {s.rollout_id: held_to.terms(s)[0] for s in batch.samples}
    targets = _advantages(batch.samples, {name: each[2] for name, each in old.items()}, config)
    groups = [{"params": list(lm.parameters())}, {"params": list(head.parameters()), "lr": config.value_learning_rate}]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM)
    for _ in range(config.epochs):
        for mini in batch.mini_batches(config.mini_batches, config):
            optimizer.zero_grad()
            for sample in mini.samples:
                logprobs, entropy, values = now.terms(sample)
                before, (advantages, returns) = old[sample.rollout_id], targets[sample.rollout_id]
                engine = torch.tensor(sample.logprobs)[torch.tensor(sample.loss_mask)]
                ppo = config.advantage == "gae"
                terms = TokenTerms(
                    logprobs,
                    before[0] if config.proximal == "trainer" else engine,
                    advantages,
                    torch.full_like(engine, sample.weight),
                    torch.zeros(len(engine), dtype=torch.int64),
                    engine_logprobs=engine if config.proximal == "trainer" else None,
                    reference_logprobs=anchors[sample.rollout_id],
                    entropy=entropy,
                    values=values if ppo else None,
                    old_values=before[2] if ppo else None,
                    returns=returns if ppo else None,
                )
                training_loss(terms, LossSettings.of(config))[0].backward()
            optimizer.step()
    named = dict(lm.named_parameters())
    if config.advantage == "gae":
        named |= {f"value_head.{name}": p for name, p in head.named_parameters()}
    return {name: optimizer.state[p]["momentum_buffer"] for name, p in named.items()}


def _advantages(samples: list[Sample], values: dict[str, Tensor], config: TrainerConfig) -> dict[str, Any]:
    if config.advantage != "gae":
        return {s.rollout_id: (torch.full((s.trained_tokens,), s.advantage), None) for s in samples}
    found = {}
    for s in samples:
        rewards = torch.zeros(s.trained_tokens)
        rewards[-1] = s.reward
        same = torch.zeros(s.trained_tokens, dtype=torch.int64)
        found[s.rollout_id] = gae(rewards, values[s.rollout_id], same, config.gae_gamma, config.gae_lambda)
    whitened = whiten(torch.cat([advantages for advantages, _ in found.values()]))
    parts = whitened.split([len(advantages) for advantages, _ in found.values()])
    return {name: (part, found[name][1]) for name, part in zip(found, parts, strict=True)}
