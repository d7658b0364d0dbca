"""The same on nodes that share nothing but the run directory: own network, /tmp, /dev/shm and processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.run_directory import RunDirectory

PROGRAM = Path(__file__).resolve().parents[1] / "cli" / "prorl_with_fakes.py"


@pytest.mark.slurm
def test_a_launch_over_real_nodes_cleans_each_of_them(slurm_namespaced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = slurm_namespaced.shared / "fakes"
    monkeypatch.setenv("FAKE_ACTS", json.dumps({"trainer-0": {"exit_after": 1.0, "finish": True}}))
    words = ["launch", "model=path", "model.path=/no/model", f"run.root={root}", "cluster=slurm"]
    words += ["cluster.rollout.nodes=2", "cluster.inference.partition=gpu", "cluster.trainer.partition=gpu"]
    done = slurm_namespaced.run([sys.executable, str(PROGRAM), *words], timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory.open((root / "latest").resolve())
    nodes = {json.loads(path.read_text())["node"] for path in run.state.glob("*-?.json")}
    assert nodes == {"cpu01", "cpu02", "gpu01", "gpu02"}
    for node in nodes:
        listed = slurm_namespaced.command(["ls", "/tmp"], node)
        assert "prorl-" not in os.popen(" ".join(listed)).read()


@pytest.mark.slurm
def test_batch_scripts_for_users_run(slurm_mini: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """one_node.sbatch starts a whole run inside an ordinary allocation."""
    script = Path(__file__).resolve().parents[2] / "sbatch" / "one_node.sbatch"
    monkeypatch.setenv("PRORL_PYTHON", sys.executable)
    words = ["env", "-C", str(tmp_path), "sbatch", "--wait", str(script), "model=tiny", "--dry-run"]
    done = slurm_mini.run(words, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = tmp_path.glob("slurm-*.out")
    assert "Nothing was started (--dry-run)" in log.read_text()
