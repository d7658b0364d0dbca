"""`doctor --on-nodes` on real Slurm: nodes that reach each other, and those that do not."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.__main__ import main as prorl_hpc_main
from prorl_hpc.cli import doctor
from prorl_hpc.cli.doctor_meeting import RACES, Meeting
from prorl_hpc.config.schema import ClusterConfig, ComponentConfig
from prorl_hpc.slurm.private.base import PrivateSlurm
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
from prorl_hpc.slurm.script import Component
from prorl_hpc.slurm.trial_allocation import srun_words

PLAN = ["cluster=slurm", "sandbox=local", "cluster.inference.partition=gpu", "cluster.trainer.partition=gpu"]


def on_nodes(cluster: PrivateSlurm, root: Path, *overrides: str, seconds: int = 120) -> tuple[dict[str, Any], str]:
    """(the JSON, standard error)."""
    command = [sys.executable, "-m", "prorl_hpc", "doctor", "--on-nodes", "--json", "--wait", "30"]
    done = cluster.run([*command, *PLAN, f"run.root={root}", *overrides], timeout_s=seconds)
    assert done.stdout, done.stderr
    assert [path.name for path in root.glob(".*")] == []
    assert cluster.run(["squeue", "-h", "-t", "PD,R"]).stdout == ""
    return json.loads(done.stdout), done.stderr


def failed(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["subject"], f["where"]) for f in told["findings"] if f["grade"] == "fail"]


@pytest.mark.slurm
def test_nodes_of_one_host_meet(slurm_mini: PrivateSlurm) -> None:
    told, _ = on_nodes(slurm_mini, slurm_mini.shared)
    assert failed(told) == []
    places = {finding["where"].split(" on ")[0] for finding in told["findings"]}
    assert places == {"", "rollout", "inference", "trainer"}


@pytest.mark.slurm
def test_nodes_of_their_own_networks_reach_each_other(slurm_namespaced: NamespacedSlurm) -> None:
    told, _ = on_nodes(slurm_namespaced, slurm_namespaced.shared, "cluster.interface=eth0")
    assert failed(told) == []
    reached = [f for f in told["findings"] if f["subject"].startswith("reach ")]
    assert len(reached) == 6 and all("10.77.0." in f["found"] for f in reached)


@pytest.mark.slurm
def test_nodes_without_a_route_are_named(slurm_namespaced: NamespacedSlurm) -> None:
    nodes = ["cluster.rollout.nodelist=cpu01", "cluster.inference.nodelist=gpu01", "cluster.trainer.nodelist=gpu02"]
    route = ["unreachable", f"{slurm_namespaced.address('cpu01')}/32"]
    subprocess.run(slurm_namespaced.command(["ip", "route", "add", *route], "gpu01"), check=True)
    try:
        told, _ = on_nodes(slurm_namespaced, slurm_namespaced.shared, *nodes)
    finally:
        subprocess.run(slurm_namespaced.command(["ip", "route", "del", *route], "gpu01"), check=True)
    assert sorted(failed(told)) == [("reach inference", "rollout on cpu01"), ("reach rollout", "inference on gpu01")]


@pytest.mark.slurm
def test_a_node_whose_cable_is_cut_is_named(slurm_namespaced: NamespacedSlurm) -> None:
    slurm_namespaced.cut("gpu02")
    try:
        told, _ = on_nodes(slurm_namespaced, slurm_namespaced.shared, "cluster.trainer.nodelist=gpu02")
    finally:
        slurm_namespaced.heal("gpu02")
        slurm_namespaced.wait_idle()
    nodes = [(subject, where) for subject, where in failed(told) if subject == "node"]
    assert nodes == [("node", "trainer on gpu02")] or ("allocation", "") in failed(told)
    assert "gpu02" in json.dumps([f for f in told["findings"] if f["grade"] == "fail"])


@pytest.mark.slurm
def test_a_run_root_that_nodes_do_not_see_is_said_by_each(slurm_namespaced: NamespacedSlurm) -> None:
    root = Path("/tmp/prorl-doctor-not-shared")  # the login node's own
    command = [sys.executable, "-m", "prorl_hpc", "doctor", "--on-nodes", "--json", *PLAN, f"run.root={root}"]
    done = slurm_namespaced.run(command, timeout_s=120)
    told = json.loads(done.stdout)
    seen = [f for f in told["findings"] if f["subject"] == "node"]
    assert len(seen) == 3 and all("must be on storage that all nodes share" in f["found"] for f in seen)


@pytest.mark.slurm
def test_ctrl_c_cancels_the_job_and_leaves_nothing(slurm_mini: PrivateSlurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prorl_hpc", "doctor", "--on-nodes", *PLAN, f"run.root={tmp_path}/new/runs"]
    command += ["cluster.setup=[sleep 60]"]
    process = subprocess.Popen(
        slurm_mini.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stderr is not None
    assert any("running" in line for line in process.stderr)
    process.send_signal(2)
    assert process.wait(30) == 130
    assert list(tmp_path.iterdir()) == []
    assert slurm_mini.run(["squeue", "-h", "-t", "PD,R"]).stdout == ""


def test_a_run_root_that_cannot_be_written_is_said_before_anything_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: iter(()))
    assert prorl_hpc_main(["doctor", "--on-nodes", "cluster=slurm", "run.root=/dev/null/runs"]) == 2
    assert "run.root=/dev/null/runs cannot be written" in capsys.readouterr().err


def test_the_trial_asks_for_little_where_the_component_would_run() -> None:
    cluster = ClusterConfig(modules=["cuda"], trainer=ComponentConfig(setup=["export A=1"]))
    options = {"nodes": "4", "time": "600", "partition": "gpu", "account": "lab", "mem": "512000M", "exclusive": ""}
    options |= {"gpus-per-node": "a100:8", "cpus-per-task": "64", "nodelist": "g[01-04]", "no-kill": "", "qos": "long"}
    words = srun_words("doc", cluster, [Component("trainer", 4, options)], {"trainer": ["python", "x y"]}, 5)
    assert words[:5] == ["srun", "--job-name=doc", "--nodes=1", "--ntasks=1", "--time=5"]
    for word in ("--partition=gpu", "--account=lab", "--mem=2048M", "--gpus-per-node=a100:1", "--cpus-per-task=2"):
        assert word in words
    assert "--nodelist=g01" in words and not any(word.startswith(("--exclusive", "--no-kill")) for word in words)
    assert words[-3:-1] == ["bash", "-c"] and "module load cuda" in words[-1] and "export A=1" in words[-1]
    assert words[-1].endswith(f"exec {shlex.join(['python', 'x y'])}")


def test_two_that_meet_in_a_directory_tell_what_they_saw(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    meetings = {name: Meeting(tmp_path, name, ["a", "b"], "") for name in ("a", "b")}
    found: dict[str, dict[str, str]] = {}
    won = []

    def meet(name: str) -> None:
        found[name] = {f.subject: f.grade for f in meetings[name].findings()}
        won.append(meetings[name].races_won())
        meetings[name].leave()

    threads = [threading.Thread(target=meet, args=(name,)) for name in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found["a"]["reach b"] == found["b"]["reach a"] == found["b"]["shared locks"] == "ok"
    assert found["a"]["clock"] == found["a"]["shared files"] == "ok"
    assert sum(won) == RACES
