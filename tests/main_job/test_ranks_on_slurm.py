"""Trainer ranks on nodes of their own networks: ZeRO-3 over both, one killed, and the run resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_quick_run import QUICK, finish, metrics, only_run, tiny_model  # noqa: F401

from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import ProcessState
from prorl_hpc.trainer.manifest import damage

pytest.importorskip("deepspeed", reason="the trainer needs the extra [train]")
pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.slurm, pytest.mark.timeout(600)]

SMALL = [
    *("engine=transformers", "sandbox=local", "trainer.groups_per_step=2", "trainer.group_size=4"),
    *("trainer.eval_prompts=4", "trainer.checkpoint_every=1"),
]
ON_SLURM = [
    *("cluster=slurm", "cluster.rollout.partition=cpu", "cluster.inference.partition=cpu"),
    *("cluster.trainer.partition=gpu", "cluster.trainer.nodes=2", "trainer.zero_stage=3", "cluster.interface=eth0"),
]


def start(cluster: Any, *words: str) -> subprocess.Popen[str]:
    command = cluster.command([sys.executable, "-m", "prorl_hpc", *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rank_processes(root: Path, name: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "prorl_hpc.trainer" in words and name in words and any(word.startswith(str(root)) for word in words):
            found.append(process.pid)
    return found


def test_zero_3_over_two_nodes_outlives_the_death_of_a_rank(slurm_namespaced: Any) -> None:
    root = Path(slurm_namespaced.shared) / "ranks"
    root.mkdir()
    launched = start(slurm_namespaced, "launch", *QUICK, *SMALL, *ON_SLURM, f"run.root={root}", "trainer.steps=5")
    while not list(root.glob("*/*/checkpoints/step-*")):
        if launched.poll() is not None:
            pytest.fail(finish(launched)[1][-4000:])
        time.sleep(0.05)
    (victim,) = rank_processes(root, "trainer-1")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code, output = finish(launched, 60)
    assert time.monotonic() - killed < 30, output  # rank 0 sits in a collective, or waits for rollouts
    assert code == 1, output[-4000:]
    # What is said is the cause, and not what rank 0 noticed of it.
    assert "The run failed: trainer-1 on gpu02 was killed by SIGKILL" in output
    assert "trainer-0 FAILED" not in output
    assert rank_processes(root, "trainer-0") == []

    run = only_run(root)
    states = [read_json(run.process_state(f"trainer-{rank}"), ProcessState) for rank in range(2)]
    assert [state.node for state in states if state is not None] == ["gpu01", "gpu02"]
    assert f"resume {run.path}" in output
    code, output = finish(start(slurm_namespaced, "resume", str(run.path)), 240)
    assert code == 0, output[-4000:]
    assert [m["step"] for m in metrics(run, "step")] == [1, 2, 3, 4, 5]
    assert damage(run.checkpoints / "step-5") == []
