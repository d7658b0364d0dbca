"""Over how many processes, GPUs and nodes one LLM server is spread."""

from __future__ import annotations

from collections.abc import Iterator

from prorl_hpc.config.policies import servers_on_node
from prorl_hpc.config.schema import ProrlConfig


def server_size(config: ProrlConfig) -> int:
    """GPUs (on CPU: processes) of one server, on all of its nodes."""
    return config.engine.tensor_parallel * config.engine.pipeline_parallel


def server_gpus_on_node(config: ProrlConfig) -> int:
    """GPUs of one server on each of its nodes."""
    return max(1, server_size(config) // max(1, config.engine.nodes_per_server))


def parallel_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    engine = config.engine
    for name in ("pipeline_parallel", "nodes_per_server"):
        if getattr(engine, name) < 1:
            yield f"engine.{name}={getattr(engine, name)}: must be at least 1"
    several = max(server_size(config), engine.nodes_per_server) > 1
    if several and engine.kind in ("transformers", "scripted"):
        yield (
            f"engine.kind={engine.kind} runs in one process: engine.tensor_parallel={engine.tensor_parallel}, "
            f"engine.pipeline_parallel={engine.pipeline_parallel} and engine.nodes_per_server="
            f"{engine.nodes_per_server} must be 1, or engine.kind=vllm"
        )
    if engine.nodes_per_server > 1:
        yield from _several_nodes(config)


def _several_nodes(config: ProrlConfig) -> Iterator[str]:
    engine, cluster = config.engine, config.cluster
    told, size = f"engine.nodes_per_server={engine.nodes_per_server}", server_size(config)
    if cluster.kind == "local":
        yield f"{told}: cluster.kind=local is one machine: set it to 1"
    if size % engine.nodes_per_server:
        yield (
            f"{told} does not divide engine.tensor_parallel={engine.tensor_parallel} times engine.pipeline_parallel="
            f"{engine.pipeline_parallel}, which is {size}: every node must have as many GPUs of a server"
        )
    if (servers := sum(servers_on_node(config).values())) != 1:
        yield (
            f"{told}: each node must hold one LLM server, not {servers}: set engine.servers_per_node=1, and "
            "servers_per_node=0 for each of policies (with servers outside the run)"
        )
    nodes = cluster.inference.nodes
    if not cluster.inference.same_nodes_as and nodes % engine.nodes_per_server:
        yield f"cluster.inference.nodes={nodes}: must be a multiple of {told}"
    if cluster.inference.same_nodes_as:
        yield f"{told}: cluster.inference needs nodes of its own, so cluster.inference.same_nodes_as must be empty"
