"""The plan, and the sbatch script it becomes. Golden files: ``PRORL_UPDATE_GOLDEN=1 pytest`` writes them anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ComponentConfig, ProrlConfig
from prorl_hpc.slurm.environment import child_environment, submission_unset
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.sbatch_options import check_extra
from prorl_hpc.slurm.script import components, render
from prorl_hpc.slurm.states import JobPhase, worst

GOLDEN, ROOT = Path(__file__).parent / "golden", Path(__file__).parents[2]


def slurm_config() -> ProrlConfig:
    config = ProrlConfig()
    config.cluster.kind = "slurm"
    return config


def site_config() -> ProrlConfig:
    """Every field of ClusterConfig set."""
    config = slurm_config()
    cluster = config.cluster
    cluster.account, cluster.qos, cluster.reservation, cluster.time_minutes = "abc123", "high", "course", 90
    cluster.extra = {"comment": "two words"}
    cluster.mail_user, cluster.mail_type, cluster.licenses = "me@example.org", ["END", "FAIL"], "matlab:2"
    cluster.modules, cluster.setup = ["cuda/12.4", "apptainer"], ["export HTTPS_PROXY=http://proxy:3128"]
    cluster.sbatch_lines = ["#BB_LUA SBF"]
    cluster.requeue, cluster.signal_lead_s, cluster.gpu_option = False, 300.0, "gres"
    cluster.rollout = ComponentConfig(nodes=2, cpus=16, memory_gib=7.5, partition="cpu", constraint="ib")
    cluster.inference = ComponentConfig(
        gpus=4, cpus=8, memory_gib=64, partition="gpu", gpu_type="a100", exclusive=True, exclude="gpu07"
    )
    cluster.trainer = ComponentConfig(
        cpus=32, partition="gpu", account="other", extra={"gres": "gpu:h100:4", "qos": "urgent"}
    )
    return config


def script_of(config: ProrlConfig) -> str:
    parts = components(config.cluster, make_plan(config))
    folder = Path("/shared/runs/2030-01-02/demo run-1a2b3c/jobs")
    command = "/opt/venv/bin/python -u -m submitit.core._submit '/shared/runs/2030-01-02/demo run-1a2b3c/jobs'"
    return render("prorl-demo-1a2b3c", folder, parts, config.cluster, command)


def without_trainer() -> ProrlConfig:
    config = site_config()
    config.trainer.enabled = False
    return config


@pytest.mark.parametrize(
    ("name", "config"), [("defaults", slurm_config()), ("site", site_config()), ("no_trainer", without_trainer())]
)
def test_the_script_is_as_the_golden_file_says(name: str, config: ProrlConfig) -> None:
    golden, text = GOLDEN / f"{name}.sbatch", script_of(config)
    if os.environ.get("PRORL_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize(
    "directory", [GOLDEN, ROOT / "sbatch", ROOT / "prorl_hpc" / "slurm" / "private"], ids=lambda path: path.name
)
def test_scripts_pass_shellcheck(directory: Path) -> None:
    scripts = [str(path) for path in directory.iterdir() if path.suffix in (".sbatch", ".sh")]
    assert scripts
    done = subprocess.run(["shellcheck", "--shell=bash", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_plan_counts_processes_over_nodes() -> None:
    config = site_config()
    config.cluster.inference.nodes = 2
    config.engine.servers_per_node = config.rollout.workers_per_node = 2
    config.cluster.trainer.nodes = 2
    config.trainer.ranks_per_node = 2
    plan = make_plan(config)
    names = [[process.name for process in node.processes] for node in plan.nodes]
    assert names == [
        ["coordinator", "worker-0", "worker-1"],
        ["worker-2", "worker-3"],
        ["inference-0", "inference-1"],
        ["inference-2", "inference-3"],
        ["trainer-0", "trainer-1"],
        ["trainer-2", "trainer-3"],
    ]
    assert [(p.rank, p.world) for p in plan.processes if p.role == "trainer"] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert make_plan(ProrlConfig()).single_node


def test_a_component_that_needs_all_its_nodes_is_not_kept_without_one() -> None:
    """Slurm would requeue the others, and they would wait for it for ever."""
    config = slurm_config()
    for component in (config.cluster.rollout, config.cluster.inference, config.cluster.trainer):
        component.nodes = 2
    parts = components(config.cluster, make_plan(config))
    assert {part.name for part in parts if "no-kill" in part.options} == {"rollout", "inference"}
    config.cluster.inference.same_nodes_as = "trainer"
    parts = components(config.cluster, make_plan(config))
    assert {part.name for part in parts if "no-kill" in part.options} == {"rollout"}


def test_unknown_and_owned_sbatch_options_are_refused_by_name() -> None:
    errors = check_extra("cluster.extra", {"acount": "x", "ntasks": "3", "gres": "gpu:1", "container-image": "a.sif"})
    assert "did you mean account" in errors[0]
    assert "one task per node" in errors[1]
    assert len(errors) == 3
    assert check_extra("cluster.extra", {"container-image": "a.sif"}, site_options=["container-image"]) == []


def test_children_and_sbatch_get_a_clean_environment() -> None:
    inside = {"SLURM_MEM_PER_NODE": "1", "SLURM_CONF": "/c", "PMIX_RANK": "0", "HOME": "/h", "SBATCH_ACCOUNT": "a"}
    assert submission_unset(inside) == ["PMIX_RANK", "SLURM_MEM_PER_NODE"]
    run = RunDirectory("/runs/demo-1", attempt=2)
    children = child_environment({**inside, "SLURMD_NODENAME": "n1", "SUBMITIT_EXECUTOR": "slurm"}, run, 3)
    assert children == {
        "SLURM_CONF": "/c", "HOME": "/h", "SLURMD_NODENAME": "n1", "PYTHONUNBUFFERED": "1",
        "PRORL_RUN_ID": "demo-1", "PRORL_ATTEMPT": "2", "PRORL_NODE_RANK": "3",
    }  # fmt: skip


def test_states() -> None:
    assert worst(["COMPLETED", "RUNNING"]) == "RUNNING"
    assert worst(["COMPLETED", "FAILED", "NODE_FAIL"]) == "NODE_FAIL"
    assert JobPhase.of("COMPLETING") is JobPhase.LIVE
    assert JobPhase.of("REQUEUE_HOLD") is JobPhase.WAITING
    assert JobPhase.of("CANCELLED") is JobPhase.ENDED
