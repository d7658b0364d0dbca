"""Which GPUs a node's processes get."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.gpus import AMD, INTEL, NVIDIA, Gpus, split_gpus, visible_gpus
from prorl_hpc.slurm.plan import make_plan


def on_slurm() -> ProrlConfig:
    config = ProrlConfig()
    config.cluster.kind = "slurm"
    return config


def test_gpus_of_one_machine_are_split_or_shared() -> None:
    config = ProrlConfig()
    config.trainer.ranks_per_node = 2
    (node,) = make_plan(config).nodes
    assert split_gpus(node, config, []) == {}
    hidden: dict[str, list[str]] = {"coordinator": [], "worker": []}
    assert split_gpus(node, config, ["0", "1", "2"]) == {"inference": ["0"], "trainer": ["1", "2"], **hidden}
    assert split_gpus(node, config, ["0", "1"]) == {"inference": ["0"], "trainer": ["0", "1"], **hidden}
    with pytest.raises(RunError, match=r"2 trainer processes of this node need 2 GPUs, it has 1"):
        split_gpus(node, config, ["0"])


def test_a_node_of_one_role_keeps_all_its_gpus() -> None:
    config = on_slurm()
    inference = make_plan(config).components[1].nodes[0]
    assert split_gpus(inference, config, ["0", "1", "2", "3"])["inference"] == ["0", "1", "2", "3"]


def test_components_on_the_same_nodes_get_different_gpus_on_each() -> None:
    config = on_slurm()
    config.engine.servers_per_node, config.engine.tensor_parallel = 1, 2
    config.cluster.inference.nodes = 2
    config.cluster.trainer.same_nodes_as = "inference"
    config.trainer.ranks_per_node = 2
    plan = make_plan(config)
    assert [component.name for component in plan.components] == ["rollout", "inference"]
    nodes = plan.components[1].nodes
    assert [[p.name for p in node.processes] for node in nodes] == [
        ["inference-0", "trainer-0", "trainer-1"],
        ["inference-1", "trainer-2", "trainer-3"],
    ]
    for node in nodes:
        shares = split_gpus(node, config, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
        assert shares["inference"] == ["GPU-a", "GPU-b"]
        assert shares["trainer"] == ["GPU-c", "GPU-d"]
    refused = (
        r"1 inference and 2 trainer processes of this node need 4 GPUs, it has 3 \(0, 1, 2\): raise cluster.inference"
    )
    with pytest.raises(RunError, match=refused):
        split_gpus(nodes[1], config, ["0", "1", "2"])


def test_everything_on_the_trainers_nodes() -> None:
    config = on_slurm()
    config.cluster.rollout.same_nodes_as = config.cluster.inference.same_nodes_as = "trainer"
    (component,) = make_plan(config).components
    (node,) = component.nodes
    shares = split_gpus(node, config, ["0", "1"])
    assert (shares["worker"], shares["inference"], shares["trainer"]) == ([], ["0"], ["1"])


def test_gpus_that_nobody_lists_are_all_of_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == Gpus(NVIDIA, ["2", "10"])
    assert visible_gpus({NVIDIA: ""}, tmp_path).ids == []
    assert visible_gpus({NVIDIA: "NoDevFiles"}, tmp_path).ids == []
    assert visible_gpus({NVIDIA: "GPU-a,MIG-b"}, tmp_path).ids == ["GPU-a", "MIG-b"]
    assert visible_gpus({NVIDIA: "0,1", AMD: "0,1", INTEL: "0,1"}, tmp_path) == Gpus(NVIDIA, ["0", "1"])


def test_gpus_of_amd_are_chosen_by_one_variable_alone(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    for i, simd in enumerate((0, 304, 304)):
        node = tmp_path / f"class/kfd/kfd/topology/nodes/{i}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\nmem_banks_count 1\n")
    assert visible_gpus({}, tmp_path, tmp_path) == Gpus(AMD, ["0", "1"])
    listed = {NVIDIA: "4,5", AMD: "4,5", "HIP_VISIBLE_DEVICES": "0,1", "HOME": "/h"}
    gpus = visible_gpus(listed, tmp_path, tmp_path)
    assert gpus == Gpus(AMD, ["4", "5"])
    assert gpus.given(listed, ["5"]) == {AMD: "5", "HOME": "/h"}


def test_gpus_of_intel(tmp_path: Path) -> None:
    assert visible_gpus({INTEL: "0,1"}, tmp_path, tmp_path) == Gpus(INTEL, ["0", "1"])
    assert Gpus(INTEL, ["0", "1"]).given({}, ["1"]) == {INTEL: "1"}
