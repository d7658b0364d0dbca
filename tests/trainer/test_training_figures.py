"""What a step says about itself, with real DeepSpeed: only what was measured, and before it is made uniform."""

from __future__ import annotations

import pytest
import torch
from trainer_samples import training_samples

from prorl_hpc.trainer.prepass import AdvantageFigures

pytestmark = pytest.mark.train


def figures(make_engine, learning_rate: float = 1e-3, **settings) -> dict[str, float]:
    engine = make_engine(**settings)
    return engine.train(training_samples(settings=engine.config), learning_rate).metrics


def test_the_gap_to_the_engine_has_nothing_of_the_steps_own_updates(make_engine):
    still, moved = (figures(make_engine, rate, epochs=4) for rate in (0.0, 1e-2))
    assert moved["ppo_kl"] != pytest.approx(still["ppo_kl"], abs=1e-3), "the policy has moved"
    for name in ("logprob_gap_mean", "logprob_gap_max"):
        assert moved[name] == pytest.approx(still[name], rel=1e-6)


def test_pieces_that_are_off_have_no_figures(make_engine):
    found = figures(make_engine)
    off = ("kl", "value_loss", "value_clip_fraction", "correction_mean", "masked_fraction", "dual_clip_fraction")
    assert not {*off, "value_mean", "explained_variance"} & found.keys()
    assert {"ppo_kl", "entropy", "ratio", "clip_fraction", "logprob_gap_mean"} <= found.keys()


def test_advantages_of_a_value_head_are_told_before_they_are_whitened(make_engine):
    """Values are 0 at first, so each advantage is the reward and none of the variance is explained."""
    found = figures(make_engine, advantage="gae", gae_lambda=1.0)
    batch = training_samples()
    rewards = torch.tensor([s.reward for s in batch.samples for _ in range(s.trained_tokens)])
    assert found["advantage_std"] == pytest.approx(float(rewards.std()), rel=1e-5)
    assert found["advantage_mean"] == found["return_mean"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert (found["value_mean"], found["explained_variance"]) == pytest.approx((0.0, 0.0), abs=1e-5)


def test_equal_returns_have_no_variance_to_explain():
    from prorl_hpc.trainer.advantages import Moments

    equal = Moments.of(torch.full((7,), 0.1))
    assert "explained_variance" not in AdvantageFigures(equal, values=equal, returns=equal).metrics()
