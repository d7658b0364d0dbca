"""A launched run whose agent is a program: coordinator, workers, engine and trainer, one step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from outside_bed import with_packages

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import AgentConfig
from prorl_hpc.observe.rollout_store import read_rollouts

pytest.importorskip("deepspeed", reason="the trainer needs the extra [train]")
pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.timeout(600)]


def launch(root: Path, *overrides: str) -> RunDirectory:
    packages = with_packages(AgentConfig())
    agent = [f"agent.binds=[{','.join(packages.binds)}]", f"+agent.env.PATH='{packages.env['PATH']}'"]
    command = [sys.executable, "-m", "prorl_hpc", "launch", "experiment=quick", f"run.root={root}", *agent, *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    (run,) = [path for path in root.glob("*/*") if (path / "config.yaml").is_file() and not path.is_symlink()]
    return RunDirectory.open(run)


def test_a_training_step_on_what_a_program_did(tmp_path: Path) -> None:
    """The tiny model's words are random: the program takes the first for its answer."""
    sizes = ["trainer.steps=1", "trainer.groups_per_step=1", "trainer.group_size=2", "trainer.dynamic_sampling=false"]
    sizes += ["trainer.eval_prompts=1", "model.max_context_tokens=2048", "trainer.micro_batch_tokens=2048"]
    run = launch(tmp_path, "agent=openai_sdk", *sizes, "task.max_turn_tokens=24")
    rows = read_rollouts(run, ["status", "failure_message", "finish", "loss_mask", "reward"]).to_pylist()
    assert len(rows) >= 3  # the step's two, and evaluations
    for row in rows:
        assert row["status"] == "done", row
        assert 0 < sum(row["loss_mask"]) < len(row["loss_mask"])
        assert row["finish"] in ("answer", "turn_tokens", "turns", "environment"), row
