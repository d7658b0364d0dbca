from __future__ import annotations

import json

import pytest

from prorl_hpc.config import deepspeed_json
from prorl_hpc.config.deepspeed_json import deepspeed_problems, user_deepspeed
from prorl_hpc.config.deepspeed_optimizers import OPTIMIZERS
from prorl_hpc.config.schema import TrainerConfig


def problems(given=None, **settings) -> str:
    return "\n".join(deepspeed_problems(TrainerConfig(deepspeed=given or {}, **settings)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"zero_optimisation": {}}, "'zero_optimisation' would be ignored; did you mean 'zero_optimization'?"),
        ({"xyzzy": 1}, "'xyzzy' would be ignored; known: aio, bf16"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "'scheduler' has no effect here: the learning rate is trainer.learning_rate",
        ),
        ({"train_batch_size": 8}, "trainer.micro_batch_tokens"),
        ({"activation_checkpointing": {}}, "set trainer.gradient_checkpointing"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3 contradicts trainer.zero_stage=1"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 contradicts trainer.max_grad_norm=1.0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1}}},
            "optimizer.params.lr=1 contradicts trainer.learning_rate",
        ),
        ({"optimizer": {"params": {}}}, "optimizer has no type"),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "'optimizer.lr' would be ignored"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean 'grad_accum_dtype'?"),
        (
            {"zero_optimization": {"reduce_buckt_size": 5}},
            "'zero_optimization.reduce_buckt_size' is refused by DeepSpeed, which has no such key; did you mean "
            "'reduce_bucket_size'?",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "'zero_optimization.offload_optimizer.pin_memry' is refused by DeepSpeed, which has no such key; did you "
            "mean 'pin_memory'?",
        ),
        ({"zero_optimization": {"offload_param": "cpu"}}, "'zero_optimization.offload_param' must be an object"),
        ({"bf16": {"enable": True}}, "'bf16.enable' is refused by DeepSpeed"),
        ({"zero_optimization": 2}, "'zero_optimization' must be an object"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=True contradicts trainer.dtype=float32"),
        ({"bf16": {"check_grad_overflow": False}}, "would let a gradient that is not finite into the weights"),
        (
            {"zero_optimization": {"compute_grad_norm": False}},
            "would let a gradient that is not finite into the weights",
        ),
        (
            {"optimizer": {"type": "Foo"}},
            "optimizer.type='Foo' cannot be used here: choose one of AdamW, Adam, SGD, Ad",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam' cannot be used here"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type='Muon' cannot be used here"),
        ({"optimizer": {"type": "sgd"}}, "did you mean SGD?"),
        ({"optimizer": {"type": 3}}, "optimizer.type=3 cannot be used here"),
        (
            {"optimizer": {"type": "SGD", "params": {"momentm": 0.9}}},
            "'optimizer.params.momentm' is no parameter of SGD; did you mean 'momentum'?",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.95]}}},
            "'optimizer.params.betas' is no parameter of",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "contradicts trainer.offload=none: set trainer.offload=optimizer",
        ),
    ],
)
def test_what_would_not_take_effect_is_named(given, expected):
    assert expected in problems(given)


def test_what_takes_effect_is_let_through():
    assert not problems()
    assert not problems({"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}, "gradient_clipping": 1.0})
    nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}}
    assert not problems(nvme, offload="optimizer", zero_stage=3)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "adamw", "ADAM"])
def test_optimizers_that_can_be_used_are_let_through(kind):
    assert not problems({"optimizer": {"type": kind, "params": {"lr": "auto", "weight_decay": 0.0}}})


def test_betas_that_an_optimizer_does_not_have_are_refused():
    told = problems({"optimizer": {"type": "SGD"}}, adam_betas=[0.8, 0.9])
    assert "trainer.adam_betas=[0.8, 0.9] has no effect with optimizer.type='SGD' (trainer.deepspeed)" in told
    assert not problems({"optimizer": {"type": "NAdam"}}, adam_betas=[0.8, 0.9])


def test_a_newer_deepspeed_judges_its_keys_itself(monkeypatch):
    unknown = {"zero_optimization": {"of_tomorrow": 1}}
    for installed, refused in (("0.18.2", True), ("0.19.8+cu12", True), ("0.20.0", False), ("1.0.0", False)):
        monkeypatch.setattr(deepspeed_json, "version", lambda name, installed=installed: installed)
        assert bool(problems(unknown)) == refused


def test_offload_needs_zero():
    assert "trainer.offload=optimizer needs trainer.zero_stage=1, 2 or 3" in problems(offload="optimizer", zero_stage=0)
    assert "trainer.offload=all needs trainer.zero_stage=3, got 2" in problems(offload="all", zero_stage=2)


def test_auto_is_left_to_the_settings_and_deepspeed_goes_over_the_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": "auto", "reduce_bucket_size": 5}})
    )
    config = TrainerConfig(deepspeed_file=str(file), deepspeed={"zero_optimization": {"reduce_bucket_size": 6}})
    assert user_deepspeed(config) == {"zero_optimization": {"reduce_bucket_size": 6}}
    assert not list(deepspeed_problems(config))


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    assert f"trainer.deepspeed_file={file}" in problems(deepspeed_file=str(file))
