"""Plans of LLM servers that are spread over several nodes."""

from __future__ import annotations

import pytest

from prorl_hpc.config.schema import ClusterConfig, ComponentConfig, EngineConfig, PolicyConfig, ProrlConfig
from prorl_hpc.config.validation import validate
from prorl_hpc.slurm.gpus import split_gpus
from prorl_hpc.slurm.losses import what_a_loss_means
from prorl_hpc.slurm.plan import ProcessPlan, make_plan


def spread(nodes: int = 4, **engine: object) -> ProrlConfig:
    given = {"kind": "vllm", "tensor_parallel": 8, "pipeline_parallel": 2, "nodes_per_server": 2} | engine
    config = ProrlConfig(engine=EngineConfig(**given))  # type: ignore[arg-type]
    config.cluster = ClusterConfig(kind="slurm", inference=ComponentConfig(nodes=nodes, gpus=8))
    config.model.path = "/models/m"
    return config


def errors(config: ProrlConfig) -> list[str]:
    return [error for error in validate(config) if "engine." in error]


def test_nodes_are_grouped_and_the_first_of_each_group_leads() -> None:
    config = spread()
    (servers,) = [component for component in make_plan(config).components if component.name == "inference"]
    assert [node.processes for node in servers.nodes] == [
        [ProcessPlan("inference-0", "inference", "inference", 0, 0, 2)],
        [ProcessPlan("inference-0-node-1", "inference", "inference", 0, 1, 2)],
        [ProcessPlan("inference-1", "inference", "inference", 1, 0, 2)],
        [ProcessPlan("inference-1-node-1", "inference", "inference", 1, 1, 2)],
    ]
    assert [p.name for p in make_plan(config).processes if p.llm_server] == ["inference-0", "inference-1"]
    assert errors(config) == []


def test_each_node_gives_its_share_of_the_gpus() -> None:
    gpus = [str(i) for i in range(8)]
    plan = make_plan(spread())
    (node,) = [node for node in plan.nodes if node.processes[0].name == "inference-1-node-1"]
    assert split_gpus(node, spread(), gpus)["inference"] == gpus


def test_a_server_is_lost_with_any_of_its_nodes() -> None:
    plan = make_plan(spread())
    names = [node.processes[0].name for node in plan.nodes]
    members = [rank for rank, name in enumerate(names) if name.endswith("-node-1")]
    assert what_a_loss_means(plan, members[:1]) == ""
    assert "no LLM server is left" in what_a_loss_means(plan, members)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (spread(nodes=3), "cluster.inference.nodes=3: must be a multiple of engine.nodes_per_server=2"),
        (spread(tensor_parallel=3, pipeline_parallel=1), "which is 3: every node must have as many GPUs"),
        (spread(servers_per_node=2), "each node must hold one LLM server, not 2"),
        (spread(kind="transformers"), "engine.kind=transformers runs in one process"),
        (spread(pipeline_parallel=0), "engine.pipeline_parallel=0: must be at least 1"),
        (spread(nodes_per_server=0), "engine.nodes_per_server=0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(config: ProrlConfig, words: str) -> None:
    assert any(words in error for error in errors(config)), errors(config)


def test_one_machine_is_one_node_and_other_policies_have_no_room() -> None:
    config = spread()
    config.cluster.kind = "local"
    assert any("cluster.kind=local is one machine" in error for error in errors(config))
    config = spread()
    config.policies = {"old": PolicyConfig()}
    assert any("each node must hold one LLM server, not 2" in error for error in errors(config))


def test_too_few_gpus_are_counted_per_node() -> None:
    config = spread()
    config.cluster.inference.gpus = 4
    (error,) = [error for error in validate(config) if error.startswith("cluster.inference.gpus=4")]
    assert "need 8 per node" in error and "engine.nodes_per_server=2" in error
