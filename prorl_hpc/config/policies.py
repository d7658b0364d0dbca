"""The policies of a run: ``model``, which is trained, and those of ``policies``, served side by side with it."""

from __future__ import annotations

from prorl_hpc.config.schema import TRAINED, ModelConfig, ProrlConfig

ANY = "any"
"""An order for this policy is given one of the run's by ``rollout.policy_weights``; none is named so."""


def policy_names(config: ProrlConfig) -> list[str]:
    """The trained one first."""
    return [TRAINED, *config.policies]


def models_of(config: ProrlConfig) -> dict[str, ModelConfig]:
    """Policy → its model, the trained one's first."""
    return {TRAINED: config.model} | {name: policy.model for name, policy in config.policies.items()}


def model_setting(policy: str) -> str:
    """The settings that a policy's model has: ``model``, ``policies.NAME.model``."""
    return "model" if policy == TRAINED else f"policies.{policy}.model"


def outside_of(config: ProrlConfig) -> dict[str, list[str]]:
    """Policy → the URLs of its outside servers."""
    return {TRAINED: config.engine.outside} | {name: policy.outside for name, policy in config.policies.items()}


def servers_on_node(config: ProrlConfig) -> dict[str, int]:
    """Policy → how many of its LLM servers run on each inference node, in the order in which they share its GPUs."""
    others = {name: policy.servers_per_node for name, policy in config.policies.items()}
    return {TRAINED: config.engine.servers_per_node} | others


def policy_of_server(config: ProrlConfig, index: int) -> str:
    """The policy that the run's LLM server ``index`` serves; they are numbered node by node. ValueError if no server
    has that number."""
    counts = servers_on_node(config)
    place = local_index(config, index)
    for policy, count in counts.items():
        if place < count:
            return policy
        place -= count
    raise ValueError(f"no inference node has a server {index}: {counts}")


def local_index(config: ProrlConfig, index: int) -> int:
    """The place of the run's LLM server ``index`` among those of its node."""
    return index % max(1, sum(servers_on_node(config).values()))
