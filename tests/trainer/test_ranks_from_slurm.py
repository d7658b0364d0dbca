from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_trainer_process import SCRIPT, ended, new_run

from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.ranks import local_rank, on_one_node, own_gpu, with_slurm_rank

TASK = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}


def test_the_rank_is_that_of_the_task():
    assert with_slurm_rank(["--run-dir", "d"], TASK) == [
        *("--run-dir", "d", "--rank", "5", "--world", "8", "--name", "trainer-5")
    ]
    assert local_rank(5, 4, TASK) == 1
    assert not on_one_node(True, TASK)


@pytest.mark.parametrize("words", [["--rank", "0", "--name", "x"], ["--world=2", "--name", "x"]])
def test_what_is_given_counts(words):
    assert with_slurm_rank(words, TASK) == words


def test_without_slurm_nothing_changes():
    assert with_slurm_rank(["--name", "x"], {}) == ["--name", "x"]
    assert local_rank(5, 4, {}) == 1
    assert on_one_node(True, {}) and not on_one_node(False, {})


def test_a_batch_script_is_no_task():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert with_slurm_rank(["--name", "x"], batch) == ["--name", "x"]


def test_a_rank_finds_its_gpu():
    """All GPUs of the node are visible, or its own alone, as under ``--gpus-per-task=1``."""
    assert [own_gpu(local, 2) for local in range(2)] == [0, 1]
    assert [own_gpu(local, 1) for local in range(2)] == [0, 0]
    with pytest.raises(RunError, match="no GPU for rank 2 of this node, which sees 2"):
        own_gpu(2, 2)


@pytest.mark.train
def test_two_tasks_of_a_step_train(tmp_path, tiny_model):
    run = new_run(tmp_path, tiny_model, ranks_per_node=2, steps=1)
    tasks = []
    for rank in range(2):
        task = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)}
        task["SLURM_STEP_NUM_NODES"] = "1"
        with run.process_log(f"trainer-{rank}").open("ab") as log:
            command = [sys.executable, str(SCRIPT), "whole", "--run-dir", str(run.path)]
            tasks.append(subprocess.Popen(command, env=os.environ | task, stdout=log, stderr=log))
    ended(run, tasks)
    assert run.finished_marker.exists()
