from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_trainer_process import SCRIPT, ended, new_run

from prorl_hpc.trainer.ranks import local_rank, on_one_node, with_slurm_rank

TASK = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}


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


@pytest.mark.train
def test_two_tasks_of_a_step_train(tmp_path, tiny_model):
    run = new_run(tmp_path, tiny_model, ranks_per_node=2, steps=1)
    tasks = []
    for rank in range(2):
        task = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_NODES": "1"}
        with run.process_log(f"trainer-{rank}").open("ab") as log:
            command = [sys.executable, str(SCRIPT), "whole", "--run-dir", str(run.path)]
            tasks.append(subprocess.Popen(command, env=os.environ | task, stdout=log, stderr=log))
    ended(run, tasks)
    assert run.finished_marker.exists()
