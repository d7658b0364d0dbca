"""What cannot be trained on ends the trainer at the first step, by name and with the way out; with the fault mended the same run goes
on with the same batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainer_process import ended, logs, new_run, start

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.metrics import MetricsLog

pytestmark = pytest.mark.train


def failure(run: RunDirectory, mode: str) -> str:
    """What the trainer says of itself once it has ended with code 1."""
    assert start(run, mode).wait(timeout=250) == 1, logs(run)
    state = read_json(run.process_state("trainer-0"), ProcessState)
    assert state is not None and state.phase is Phase.FAILED
    return state.detail


def test_faults_of_a_batch_are_named_and_the_run_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    run = new_run(tmp_path, tiny_model, eval_prompts=1)
    told = failure(run, "ids")
    assert "has token id 1000000" in told and "the tokenizer that belongs to model.path" in told
    told = failure(run, "memory")
    assert "ran out of memory" in told and "trainer.micro_batch_tokens=32 can be lowered" in told
    assert not run.finished_marker.exists() and not list(run.checkpoints.glob("step-*"))
    ended(run, [start(run, "whole")])
    assert run.finished_marker.exists()
    asked = (run.state / "asked").read_text().split()
    assert asked == ["eval-0", "step-1", "step-1", "step-1", "step-2", "eval-2"]
    steps = [record["step"] for record in MetricsLog(run.metrics_file).read() if record["kind"] == "step"]
    assert steps == [1, 2], "a step that failed left no record"


def test_files_are_looked_at_on_the_trainers_node(tmp_path: Path, tiny_model: Path) -> None:
    run = new_run(tmp_path, tiny_model, kl_coefficient=0.1, kl_model="/gone")
    assert failure(run, "whole").startswith("trainer.kl_model=/gone is not a directory")
    run = new_run(tmp_path, tmp_path / "gone")
    assert failure(run, "whole").startswith(f"model.path={tmp_path}/gone is not a directory")
