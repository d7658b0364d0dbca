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
