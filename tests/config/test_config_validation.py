"""Everything that is wrong is found at once, named, with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import compose
from prorl_hpc.config.validation import setting, validate


def changed(**values: Any) -> ProrlConfig:
    config = ProrlConfig()
    config.model.prepare = "tiny"
    for dotted, value in values.items():
        group, _, name = dotted.rpartition("__")
        setattr(setting(config, group.replace("__", ".")), name, value)
    return config


@pytest.mark.parametrize("overrides", [[], ["experiment=quick"], ["cluster=slurm"], ["cluster=site_gpu"]])
def test_the_configurations_that_come_with_it_are_valid(overrides: list[str]) -> None:
    assert validate(compose(overrides)) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainer__steps": 0}, "trainer.steps=0: must be at least 1"),
        ({"trainer__learning_rate": float("nan")}, "trainer.learning_rate=nan"),
        ({"engine__kind": "gpt"}, "one of auto, vllm, transformers, scripted"),
        ({"model__thinking": "maybe"}, "model.thinking=maybe: must be one of auto, on, off"),
        ({"agent__max_calls": 0}, "agent.max_calls=0: must be at least 1"),
        ({"agent__answer": "file:"}, "agent.answer=file:: must be last_message, stdout, or file:NAME"),
        ({"agent__env": {"A": "1"}}, "agent.env has no effect with agent.kind=native: set agent.kind=outside"),
        ({"agent__kind": "outside"}, "must be the program that agent.kind=outside starts"),
        ({"engine__kind": "scripted", "engine__script": {"repy_min": 1}}, "did you mean reply_min_tokens?"),
        ({"run__name": "../up"}, "run.name="),
        ({"model__prepare": ""}, "model.path is empty"),
        ({"trainer__max_rows_per_step": 2}, "never be filled"),
        ({"trainer__soft_overlong_cache_tokens": 10}, "trainer.max_response_tokens=0"),
        ({"trainer__adam_betas": [0.9]}, "two numbers"),
        ({"rollout__run_s": 1e6}, "rollout.total_s"),
        ({"rollout__lost_after_s": 1.0}, "live nodes are taken as lost"),
        (
            {"rollout__balancing": "fastest"},
            "rollout.balancing=fastest: must be one of least_in_flight, round_robin, round_robin_per_request",
        ),
        ({"rollout__when_server_lost": "wait"}, "rollout.when_server_lost=wait: must be one of move, retry"),
        ({"rollout__workers_per_node": 0}, "rollout.workers_per_node=0: must be at least 1"),
        ({"rollout__drain_s": -1.0}, "rollout.drain_s=-1.0: must be 0 or more"),
        ({"rollout__drain_s": 25.0}, "rollout.drain_s=25 must be less than run.stop_timeout_s=25"),
        ({"run__restarts": -1}, "run.restarts=-1: must be 0 or more"),
        ({"trainer__when_full": "keep"}, "trainer.when_full=keep: must be one of cancel, carry"),
        (
            {"trainer__when_full": "carry", "trainer__staleness": 1},
            "trainer.max_parallel_groups=0 must be greater than trainer.groups_per_step=4",
        ),
        ({"task__max_turn_tokens": 5000}, "leaves no room"),
        ({"sandbox__max_processes": 4}, "sandbox.max_processes=4: must be 8 or more"),
        ({"sandbox__max_processes": 8, "sandbox__ipython": "kernel"}, "16 or more"),
        ({"sandbox__max_memory_mib": 10}, "sandbox.max_memory_mib=10: must be 0 (no limit), or 64 or more"),
        ({"sandbox__network": "lan"}, "sandbox.network=lan: must be one of none, host"),
        ({"sandbox__writable": "all"}, "sandbox.writable=all: must be one of workspace, image"),
        ({"cluster__account": "x"}, "cluster.account=x has no effect"),
        ({"cluster__rollout__partition": "x"}, "cluster.rollout.partition=x has no effect"),
        ({"cluster__kind": "slurm", "cluster__inference__gpus": 1, "engine__tensor_parallel": 2}, "need 2 per node"),
        ({"cluster__kind": "slurm", "cluster__trainer__gpus": 1, "trainer__ranks_per_node": 2}, "a GPU of its own"),
    ],
)
def test_one_mistake_is_one_sentence(values: dict[str, Any], words: str) -> None:
    errors = validate(changed(**values))
    assert len(errors) == 1, errors
    assert words in errors[0]


def test_all_mistakes_are_told_together() -> None:
    assert len(validate(changed(trainer__steps=0, engine__threads=0, cluster__qos="x"))) == 3


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [([], 8), (["model=tiny"], 3), (["experiment=quick"], 3), (["experiment=quick", "model=smollm2"], 8)],
)
def test_the_memory_that_is_asked_for_goes_with_the_model(overrides: list[str], gib: float) -> None:
    assert compose(overrides).run.min_free_memory_gib == gib
