"""Groups ``policies`` and ``rollout.policy_weights``: names, models, servers and shares that cannot be."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator

from prorl_hpc.config.policies import ANY, model_setting, models_of, outside_of, policy_names, servers_on_node
from prorl_hpc.config.schema import TRAINED, PolicyConfig, ProrlConfig

MOST_POLICIES = 32
"""Each is a label value of several metrics."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,23}")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?|unix:/\S+")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
"""module:function"""


def policy_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    if len(config.policies) > MOST_POLICIES:
        yield f"policies: {len(config.policies)} of them are named, {MOST_POLICIES} at most can be"
    for name, policy in config.policies.items():
        yield from _name(name)
        yield from _model(config, name)
        yield from _servers(config, name, policy)
        if policy.reward and not FUNCTION.fullmatch(policy.reward):
            yield (
                f"policies.{name}.reward={policy.reward}: must be module:function, like "
                "my_package.rewards:shorter_is_better, or empty for the task's own reward"
            )
    for name, urls in outside_of(config).items():
        yield from _outside("engine.outside" if name == TRAINED else f"policies.{name}.outside", urls)
    yield from _weights(config)


def _name(name: str) -> Iterator[str]:
    if name in (TRAINED, ANY):
        why = "is the policy that `model` is" if name == TRAINED else "stands for one of them, drawn by their weights"
        yield f"policies.{name}: {name!r} {why}: choose another name"
    elif not _NAME.fullmatch(name):
        yield (
            f"policies.{name}: a policy's name must be 1 to 24 letters, digits, _ or -, the first a letter or digit (it "
            "names processes and labels of metrics)"
        )


def _model(config: ProrlConfig, name: str) -> Iterator[str]:
    model, where = models_of(config)[name], model_setting(name)
    if not model.path and not model.prepare:
        yield (
            f"{where}.path is empty and {where}.prepare too: give a model directory, such as that of a checkpoint, or a "
            "recipe that makes one (`prorl-hpc model list`)"
        )


def _servers(config: ProrlConfig, name: str, policy: PolicyConfig) -> Iterator[str]:
    setting = f"policies.{name}.servers_per_node={policy.servers_per_node}"
    if policy.servers_per_node < 0:
        yield f"{setting}: must be 0 or more"
    elif policy.servers_per_node == 0 and not policy.outside:
        yield f"{setting}: nobody would serve it: set it to 1 or more, or name servers in policies.{name}.outside"
    elif policy.servers_per_node and not _has_inference_nodes(config):
        yield (
            f"{setting} with cluster.inference.nodes=0: no node would run them: set it to 0 and name servers in "
            f"policies.{name}.outside, or give inference nodes"
        )
    elif policy.servers_per_node and config.engine.nodes_per_server > 1:
        yield (
            f"{setting} with engine.nodes_per_server={config.engine.nodes_per_server}: a server that is spread over "
            f"several nodes has them for itself: set it to 0 and name servers in policies.{name}.outside"
        )


def _has_inference_nodes(config: ProrlConfig) -> bool:
    inference = config.cluster.inference
    return bool(inference.nodes or inference.same_nodes_as)


def _outside(setting: str, urls: list[str]) -> Iterator[str]:
    for url in urls:
        if not _URL.fullmatch(url):
            yield (
                f"{setting}: {url!r} must be the URL of an OpenAI server, such as http://node7:8000/v1 or "
                "unix:/run/llm.sock"
            )
    if len(set(urls)) < len(urls):
        yield f"{setting}={','.join(urls)}: every server must be named once"


def _weights(config: ProrlConfig) -> Iterator[str]:
    weights, names = config.rollout.policy_weights, policy_names(config)
    for name, weight in weights.items():
        if name not in names:
            yield f"rollout.policy_weights.{name}: there is no policy {name!r}; {nearest(name, names)}"
        if not (math.isfinite(weight) and weight >= 0):
            yield f"rollout.policy_weights.{name}={weight}: must be 0 or more"
    if weights and not any(weight > 0 for weight in weights.values()):
        yield (
            "rollout.policy_weights: all of them are 0, so no policy could be drawn: set one greater than 0, or leave them "
            "out for equal shares"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean …? policies: …``"""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean {near[0]}? " if near else "") + f"policies: {', '.join(names)}"


def servers_told(config: ProrlConfig) -> str:
    """The settings that say how many LLM servers a node runs, with their values."""
    own = f"engine.servers_per_node={config.engine.servers_per_node}"
    others = [f"policies.{n}.servers_per_node={count}" for n, count in servers_on_node(config).items() if n != TRAINED]
    return " plus ".join([own, *others])
