"""Groups ``policies`` and ``rollout.policy_weights``: what is refused, how it is told, and what plan it gives."""

from __future__ import annotations

import pytest

from prorl_hpc.config.policies import local_index, policy_of_server, servers_on_node
from prorl_hpc.config.schema import ModelConfig, PolicyConfig, ProrlConfig
from prorl_hpc.config.store import compose
from prorl_hpc.config.validation import validate
from prorl_hpc.slurm.plan import make_plan


def config_with(**policies: PolicyConfig) -> ProrlConfig:
    config = ProrlConfig()
    config.model.path = "/m"
    config.policies = policies
    return config


def policy(**settings: object) -> PolicyConfig:
    return PolicyConfig(model=ModelConfig(name="", path="/base"), **settings)  # type: ignore[arg-type]


def test_policies_that_can_be() -> None:
    config = config_with(base=policy(servers_per_node=2), judge=policy(servers_per_node=0, outside=["http://n:1/v1"]))
    config.rollout.policy_weights = {"policy": 3, "base": 1.5, "judge": 0}
    assert validate(config) == []


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("policy", {}, "policies.policy: 'policy' is the policy that `model` is"),
        ("any", {}, "policies.any: 'any' stands for one of them"),
        ("a b", {}, "policies.a b: a policy's name must be 1 to 24 letters"),
        ("x" * 25, {}, "must be 1 to 24 letters"),
        ("b", {"servers_per_node": -1}, "policies.b.servers_per_node=-1: must be 0 or more"),
        ("b", {"servers_per_node": 0}, "policies.b.servers_per_node=0: nobody would serve it"),
        ("b", {"servers_per_node": 5000}, "policies.b.servers_per_node=5000: must be at most 1,024"),
        ("b", {"outside": ["node:80"]}, "policies.b.outside: 'node:80' must be the URL"),
        ("b", {"outside": ["http://a/v1"] * 2}, "policies.b.outside=http://a/v1,http://a/v1: every server"),
        ("b", {"reward": "rewards.shorter"}, "policies.b.reward=rewards.shorter: must be module:function"),
    ],
)
def test_policies_that_cannot_be(name: str, settings: dict[str, object], words: str) -> None:
    (told,) = validate(config_with(**{name: policy(**settings)}))
    assert words in told


def test_a_policy_needs_a_model_with_room() -> None:
    config = config_with(b=PolicyConfig())
    assert [error.split(":")[0] for error in validate(config)] == [
        "policies.b.model.path is empty and policies.b.model.prepare too"
    ]
    config.policies["b"].model = ModelConfig(path="/b", max_context_tokens=8)
    assert "policies.b.model.max_context_tokens=8" in " ".join(validate(config))
    config.policies["b"].model.max_context_tokens = 0
    assert "policies.b.model.max_context_tokens=0: must be at least 1" in validate(config)


def test_servers_of_a_policy_need_nodes() -> None:
    config = config_with(b=policy())
    config.trainer.enabled, config.cluster.inference.nodes, config.engine.outside = False, 0, ["http://a/v1"]
    (told,) = validate(config)
    assert told.startswith("policies.b.servers_per_node=1 with cluster.inference.nodes=0: no node would run them")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {"bsae": 1.0},
            "rollout.policy_weights.bsae: there is no policy 'bsae'; did you mean base? policies: policy, base",
        ),
        ({"base": -1.0, "policy": 2.0}, "rollout.policy_weights.base=-1.0: must be 0 or more"),
        ({"base": float("nan"), "policy": 2.0}, "rollout.policy_weights.base=nan: must be 0 or more"),
        ({"base": 0.0}, "rollout.policy_weights: all of them are 0"),
    ],
)
def test_weights_that_cannot_be(weights: dict[str, float], words: str) -> None:
    config = config_with(base=policy())
    config.rollout.policy_weights = weights
    (told,) = validate(config)
    assert told.startswith(words)


def test_gpus_are_counted_for_all_policies() -> None:
    config = config_with(base=policy(servers_per_node=2))
    config.cluster.kind, config.cluster.time_minutes = "slurm", 600
    config.engine.tensor_parallel, config.cluster.inference.gpus = 2, 4
    (told,) = validate(config)
    assert "cluster.inference.gpus=4: its processes need 6 per node" in told
    assert "(engine.servers_per_node=1 plus policies.base.servers_per_node=2) times engine.tensor_parallel=2" in told
    config.cluster.inference.gpus = 6
    assert validate(config) == []


def test_each_inference_node_runs_servers_of_every_policy() -> None:
    config = config_with(base=policy(servers_per_node=2), judge=policy(servers_per_node=0, outside=["http://n:1/v1"]))
    config.cluster.kind, config.cluster.inference.nodes = "slurm", 2
    (component,) = [c for c in make_plan(config).components if c.name == "inference"]
    assert [[(p.name, p.index) for p in node.processes] for node in component.nodes] == [
        [("inference-0", 0), ("inference-base-0", 1), ("inference-base-1", 2)],
        [("inference-1", 3), ("inference-base-2", 4), ("inference-base-3", 5)],
    ]
    assert [policy_of_server(config, i) for i in range(6)] == ["policy", "base", "base"] * 2
    assert [local_index(config, i) for i in range(6)] == [0, 1, 2, 0, 1, 2], "which of the node's GPUs"
    assert servers_on_node(config) == {"policy": 1, "base": 2, "judge": 0}
    assert all(p.role == "inference" for node in component.nodes for p in node.processes)


def test_the_plan_of_one_policy_is_what_it_was() -> None:
    config = config_with()
    config.engine.servers_per_node = 2
    names = [p.name for p in make_plan(config).processes if p.role == "inference"]
    assert names == ["inference-0", "inference-1"]


def test_the_example_experiment_composes() -> None:
    config = compose(["experiment=ab"])
    assert validate(config) == []
    assert set(config.rollout.policy_weights) <= {"policy", *config.policies} and len(config.policies) == 1
    assert isinstance(next(iter(config.policies.values())), PolicyConfig)
