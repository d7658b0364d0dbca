"""DAPO's gradient is that of a plain computation, and does not depend on how the batch is cut. Other algorithms and several ranks:
test_update_invariance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_samples import training_samples

pytestmark = pytest.mark.train


def first_moments(engine) -> dict[str, torch.Tensor]:
    """Adam's exp_avg after the first step: 0.1 × the gradient."""
    from deepspeed.utils import safe_get_full_optimizer_state

    plain = engine._deepspeed.optimizer
    found = {}
    for name, parameter in engine.policy.lm.named_parameters():
        if engine.stage == 0:
            found[name] = plain.state[parameter]["exp_avg"].clone()
        else:
            found[name] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    return found


def plain_gradients(model: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """No DeepSpeed, no packing, no clip function of ours: DAPO eq. 8, one sample after the other."""
    from transformers import AutoModelForCausalLM

    batch = training_samples()
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = torch.zeros(())
    for sample in batch.samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = lm(ids).logits[0, :-1].log_softmax(-1)
        for t in range(1, len(sample.token_ids)):
            if sample.loss_mask[t]:
                ratio = (logprobs[t - 1, sample.token_ids[t]] - sample.logprobs[t]).exp()
                clipped = ratio.clamp(0.8, 1.28)
                loss = loss - torch.minimum(ratio * sample.advantage, clipped * sample.advantage) / batch.total_tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in lm.named_parameters()}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> tuple[float, dict[str, torch.Tensor]]:
    return plain_gradients(tiny_model)


def check(found, metrics, expected):
    loss, gradients = expected
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, moment in found.items():
        # exp_avg = (1 − β1) g after the first step
        torch.testing.assert_close(moment / 0.1, gradients[name], rtol=1e-4, atol=1e-5 * float(norm), msg=name)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"micro_batch_tokens": 4096, "zero_stage": 0}, True),
        ({"micro_batch_tokens": 4096, "zero_stage": 0}, False),
        ({"micro_batch_tokens": 40, "zero_stage": 0}, True),
        ({"micro_batch_tokens": 40, "zero_stage": 0, "gradient_checkpointing": True}, True),
        ({"micro_batch_tokens": 60, "zero_stage": 1}, False),
        ({"micro_batch_tokens": 40, "zero_stage": 2}, True),
        ({"micro_batch_tokens": 40, "zero_stage": 3}, True),
    ],
)
def test_one_rank_many_cuts_one_gradient(make_engine, expected, settings, share):
    engine = make_engine(**settings)
    assert engine.policy.shares_prompts
    engine.policy.shares_prompts = share
    outcome = engine.train(training_samples(), 1e-3)
    if settings["micro_batch_tokens"] < 100:
        assert outcome.micro_batches >= 4
    check(first_moments(engine), outcome.metrics, expected)


def test_logits_in_chunks_give_the_same_gradient(make_engine, expected, monkeypatch):
    monkeypatch.setattr("prorl_hpc.trainer.policy.CHUNK_TOKENS", 7)
    engine = make_engine(micro_batch_tokens=4096, zero_stage=0)
    outcome = engine.train(training_samples(), 1e-3)
    check(first_moments(engine), outcome.metrics, expected)


def test_temperature_divides_the_logits(make_engine, tiny_model):
    engine = make_engine(zero_stage=0)
    ids = torch.tensor([[5, 6, 7, 8]])
    places, targets = torch.arange(3), ids[0, 1:]
    with torch.no_grad():
        logits = engine.policy.lm(ids).logits[0, :-1]
        logprobs, entropy, _ = engine.policy(ids, torch.arange(4)[None], None, places, targets, 0.5)
    distribution = torch.distributions.Categorical(logits=logits / 0.5)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, distribution.entropy(), atol=1e-5, rtol=1e-5)
