"""The trainer as processes: one rank and two, to the end and stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, ProrlConfig, RunSettings, TaskConfig, TrainerConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.trainer import checkpoint
from prorl_hpc.transport.keys import RunKeys

pytestmark = pytest.mark.train
SCRIPT = Path(__file__).with_name("trainer_process.py")


def new_run(root: Path, model: Path, **trainer) -> RunDirectory:
    settings = {
        "steps": 2,
        "groups_per_step": 2,
        "group_size": 4,
        "eval_prompts": 4,
        "threads": 1,
        "dtype": "float32",
        "micro_batch_tokens": 32,
        "learning_rate": 1e-3,
    }
    config = ProrlConfig(
        run=RunSettings(root=str(root), start_timeout_s=120),
        model=ModelConfig(path=str(model)),
        task=TaskConfig(max_turn_tokens=6),
        trainer=TrainerConfig(**(settings | trainer)),
    )
    return RunDirectory.create(config)


def start(run: RunDirectory, mode: str, rank: int = 0, world: int = 1) -> subprocess.Popen[bytes]:
    name = f"trainer-{rank}"
    command = [sys.executable, str(SCRIPT), mode, "--run-dir", str(run.path), "--name", name]
    with run.process_log(name).open("ab") as log:
        return subprocess.Popen([*command, "--rank", str(rank), "--world", str(world)], stdout=log, stderr=log)


def logs(run: RunDirectory) -> str:
    return "\n".join(path.read_text() for path in sorted(run.logs.glob("*.log")))


def wait_for_mark(run: RunDirectory, mark: str, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 200
    while not (run.state / mark).exists():
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), logs(run)
        time.sleep(0.05)


def ended(run: RunDirectory, processes: list[subprocess.Popen[bytes]]) -> None:
    assert [p.wait(timeout=250) for p in processes] == [0] * len(processes), logs(run)
    for rank in range(len(processes)):
        state = read_json(run.process_state(f"trainer-{rank}"), ProcessState)
        assert state is not None and state.phase is Phase.ENDED
    assert not run.runtime_dir("/dev/shm").exists()


@pytest.mark.parametrize(("world", "stage", "publish"), [(1, 1, "disk"), (2, 3, "direct")])
def test_a_whole_run(tmp_path, tiny_model, world, stage, publish):
    run = new_run(tmp_path, tiny_model, zero_stage=stage, ranks_per_node=world, publish=publish)
    RunKeys.create(run.keys)
    ended(run, [start(run, "whole", rank, world) for rank in range(world)])
    assert run.finished_marker.exists()
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None and newest.state.position.step == 2
    steps = newest_per_step(MetricsLog(run.metrics_file).read(), "step")
    assert [r["step"] for r in steps] == [1, 2]
    assert all(r["logprob_gap_max"] < 1e-4 and r["probe_gap"] < 1e-4 for r in steps)
    assert not list(run.weights.iterdir())


@pytest.mark.parametrize(("world", "number"), [(1, signal.SIGUSR2), (2, signal.SIGTERM)])
def test_a_signal_while_rollouts_run_and_resume(tmp_path, tiny_model, world, number):
    run = new_run(tmp_path, tiny_model, ranks_per_node=world)
    ranks = [start(run, "hang-2", rank, world) for rank in range(world)]
    wait_for_mark(run, "hang-2", ranks)
    for rank in ranks:
        rank.send_signal(number)
    ended(run, ranks)
    assert re.search(r"stopped as asked, \d+\.\d s after the signal", logs(run))
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None and newest.state.position.step == 1
    assert not run.finished_marker.exists()

    ended(run, [start(run, "whole", rank, world) for rank in range(world)])
    assert run.finished_marker.exists()
    assert [r["step"] for r in newest_per_step(MetricsLog(run.metrics_file).read(), "step")] == [1, 2]
    assert sum(r["kind"] == "eval" and r["step"] == 0 for r in MetricsLog(run.metrics_file).read()) == 1


def test_sigterm_while_the_model_loads(tmp_path, tiny_model):
    run = new_run(tmp_path, tiny_model)
    rank = start(run, "whole")
    wait_for_mark(run, "trainer-0.json", [rank])
    rank.send_signal(signal.SIGTERM)
    ended(run, [rank])
    assert not run.finished_marker.exists()


def test_a_model_that_cannot_be_used_is_told_in_one_line(tmp_path, tiny_model):
    run = new_run(tmp_path, tmp_path / "nowhere")
    rank = start(run, "whole")
    assert rank.wait(timeout=200) == 1
    assert "is not a directory: give a Hugging Face model directory" in logs(run)
    assert "Traceback" not in logs(run)
    state = read_json(run.process_state("trainer-0"), ProcessState)
    assert state is not None and state.phase is Phase.FAILED and "nowhere" in state.detail
