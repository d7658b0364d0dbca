"""Components on the same nodes, and processes in containers, on real Slurm; the processes are fakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.container import in_container, make_image
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ComponentConfig, ProrlConfig
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job

pytestmark = pytest.mark.slurm
DUMP = {"dump_environment": True}


@pytest.fixture(autouse=True)
def on_the_cluster(slurm_mini: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    yield


def started(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> tuple[RunDirectory, Job]:
    run = fake_run(config, acts)
    return run, submit(run, config, fake_plan(config))


def gpus_of(run: RunDirectory, name: str) -> str:
    environ: dict[str, str] = json.loads((run.logs / f"{name}.env.json").read_text())
    return environ["CUDA_VISIBLE_DEVICES"]


def test_inference_and_trainer_on_the_same_nodes_have_gpus_of_their_own(tmp_path: Path) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.cluster.rollout.nodes = 1
    config.cluster.inference = ComponentConfig(partition="gpu", gpus=2, cpus=2, nodes=2)
    config.cluster.trainer = ComponentConfig(same_nodes_as="inference")
    finish = {**DUMP, "exit_after": 1.0, "finish": True}
    run, job = started(config, {"inference-0": DUMP, "inference-1": DUMP, "trainer-0": finish, "trainer-1": DUMP})
    assert job.wait(60)
    assert read_failure(run) is None, read_failure(run)
    assert [gpus_of(run, f"{role}-{i}") for role in ("inference", "trainer") for i in (0, 1)] == ["0", "0", "1", "1"]
    assert processes_of(run) == []


def test_a_node_with_too_few_gpus_for_both_says_so(tmp_path: Path) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.cluster.rollout.nodes = 1
    config.cluster.inference = ComponentConfig(partition="gpu", gpus=1, cpus=2)
    config.cluster.trainer = ComponentConfig(same_nodes_as="inference")
    run, job = started(config, {})
    assert job.wait(60)
    failure = read_failure(run)
    assert failure is not None
    assert (
        "1 inference and 1 trainer processes of this node need 2 GPUs, it has 1 (0): raise cluster.inference.gpus"
        in (failure.what)
    )
    assert processes_of(run) == []


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs Apptainer")
def test_all_components_in_a_container(tmp_path: Path) -> None:
    config = in_container(fake_config(tmp_path, slurm=True), make_image(tmp_path / "image"))
    acts = {
        "inference-0": DUMP,
        "trainer-0": {"exit_after": 1.0, "finish": True, "finish_after_starts": {"inference-0": 1}},
    }
    run, job = started(config, acts)
    assert job.wait(90)
    assert read_failure(run) is None, read_failure(run)
    assert job.state() == "COMPLETED"
    environ = json.loads((run.logs / "inference-0.env.json").read_text())
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert environ["SLURMD_NODENAME"] == "gpu01"
    assert "APPTAINER_CONTAINER" in environ
    assert processes_of(run) == []
