"""A step is that of a plain computation whatever its algorithm, and however the batch is cut: into micro-batches, rows and ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_step import LEARNING_RATE, PIECES, config_of, plain_step
from trainer_samples import training_samples
from two_ranks import momenta

pytestmark = pytest.mark.train
CUTS = {
    "whole": {"micro_batch_tokens": 4096, "zero_stage": 0},
    "cut": {"micro_batch_tokens": 40, "zero_stage": 0},
    "padded": {"micro_batch_tokens": 60, "zero_stage": 1, "share_prompts": False},
}
ON_TWO_RANKS = [f"{piece}:{i % 4}" for i, piece in enumerate(PIECES)] + ["ppo:0", "ppo:1", "ppo:3", "grpo:3"]
"""Each piece, all ZeRO stages, and PPO, which has most in it, with every stage."""


@pytest.fixture(scope="module")
def reference_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, its weights moved a little."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("reference")
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    lm.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(tiny_model: Path, reference_model: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    known: dict[str, dict[str, torch.Tensor]] = {}

    def of(piece: str) -> dict[str, torch.Tensor]:
        if piece not in known:
            known[piece] = plain_step(tiny_model, reference_model, config_of(piece))
        return known[piece]

    return of


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-5 of the whole gradient's norm."""
    assert found.keys() == expected.keys()
    norm = float(torch.stack([m.norm() for m in expected.values()]).norm())
    assert norm > 1e-3
    for name, momentum in found.items():
        torch.testing.assert_close(
            momentum, expected[name], rtol=1e-4, atol=1e-5 * norm, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("piece", PIECES)
def test_one_rank(make_engine, reference_model, expected, piece, cut):
    config = config_of(piece, **CUTS[cut])
    engine = make_engine(config=config, reference_path=str(reference_model))
    outcome = engine.train(training_samples(settings=config), LEARNING_RATE)
    if cut != "whole":
        assert outcome.micro_batches >= 4
    assert outcome.metrics["optimizer_steps"] == config.epochs * config.mini_batches
    check(momenta(engine), expected(piece))


@pytest.fixture(scope="module")
def of_two_ranks(tiny_model, reference_model, tmp_path_factory):
    state = tmp_path_factory.mktemp("two-ranks")
    (state / "trainer-group.json").write_text('{"host": "127.0.0.1", "port": 9, "word": "left by an earlier job"}')
    output = state / "out.pt"
    script = str(Path(__file__).with_name("two_ranks.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tiny_model, reference_model, state, str(rank), output, *ON_TWO_RANKS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=500)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return torch.load(output)


@pytest.mark.parametrize("step", ON_TWO_RANKS)
def test_two_ranks(of_two_ranks, expected, step):
    found = of_two_ranks[step]
    check(found["momenta"], expected(step.partition(":")[0]))
    assert not {name for name in found["weights"] if "value_head" in name or name == "lm_head.weight"}
    assert bool(found["extra"]) == step.startswith("ppo")


def test_two_ranks_have_the_metrics_of_one(make_engine, of_two_ranks):
    config = config_of("ppo", **CUTS["whole"])
    alone = make_engine(config=config).train(training_samples(settings=config), LEARNING_RATE).metrics
    together = of_two_ranks["ppo:1"]["metrics"]
    assert together == pytest.approx(alone, rel=1e-3, abs=1e-5)
    assert {"value_mean", "return_mean", "explained_variance"} <= alone.keys()
