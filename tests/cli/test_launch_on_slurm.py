"""launch against a real Slurm: plans that it cannot run are told before, and a refusal leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.job import Job

pytestmark = pytest.mark.slurm
PROGRAM = [sys.executable, str(Path(__file__).with_name("prorl_with_fakes.py"))]
SITE = [
    "model=path",
    "model.path=/no/model",
    "cluster=slurm",
    "cluster.time_minutes=5",
    "cluster.rollout.partition=cpu",
]
SITE += ["cluster.inference.partition=gpu", "cluster.trainer.partition=gpu"]


@pytest.fixture
def prorl(slurm_mini: Any, tmp_path: Path) -> Any:
    environment = {**os.environ, "SLURM_CONF": str(slurm_mini.conf), "PRORL_HOME": str(tmp_path / "home")}
    environment["FAKE_ACTS"] = json.dumps({"trainer-0": {"exit_after": 0.3, "finish": True}})
    place = tmp_path / "here"
    place.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words], cwd=place, env=environment, capture_output=True, text=True, timeout=90
        )

    return run


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("cluster.trainer.partition=moon", ("cluster.trainer.partition=moon", "cpu")),
        ("cluster.inference.gpus=64", ("cluster.inference.gpus=64",)),
        ("cluster.rollout.nodes=50", ("cluster.rollout.nodes=50",)),
        ("cluster.rollout.constraint=quantum", ("cluster.rollout.constraint=quantum",)),
        ("cluster.rollout.cpus=4096", ("cluster.rollout.cpus=4096",)),
    ],
)
def test_a_plan_that_the_site_cannot_run_is_told_before_it_is_submitted(
    prorl: Any, tmp_path: Path, word: str, told: tuple[str, ...]
) -> None:
    for more in ([], ["--dry-run"]):
        done = prorl("launch", *SITE, word, *more)
        assert done.returncode == 2
        assert all(part in done.stderr for part in told), done.stderr
        assert "Traceback" not in done.stderr
    assert list((tmp_path / "here").iterdir()) == []


def test_what_only_sbatch_refuses_leaves_nothing_and_says_what_to_set(prorl: Any, tmp_path: Path) -> None:
    word = "+cluster.rollout.extra.gres=moonstone:1"
    shown = prorl("launch", *SITE, word, "--dry-run")
    assert shown.returncode == 2
    assert "#SBATCH --gres=moonstone:1" in shown.stdout
    done = prorl("launch", *SITE, word)
    assert done.returncode == 2
    for said in (shown.stderr, done.stderr):
        assert "Slurm refused the job" in said and "cluster.rollout.extra={'gres': 'moonstone:1'}" in said, said
    assert list((tmp_path / "here").iterdir()) == []
    assert not list((tmp_path / "home").glob("runs/*"))


def test_a_dry_run_is_the_same_every_time_and_asks_sbatch(prorl: Any, tmp_path: Path) -> None:
    shown = [prorl("launch", *SITE, "--dry-run") for _ in range(2)]
    assert [done.returncode for done in shown] == [0, 0], shown[0].stderr
    plans = [done.stdout.partition("sbatch --test-only says:")[0] for done in shown]
    assert plans[0] == plans[1] and "to start at" in shown[0].stdout
    assert list((tmp_path / "here").iterdir()) == []


def test_a_sweep_submits_one_run_each_and_comes_back(prorl: Any, tmp_path: Path) -> None:
    done = prorl("launch", *SITE, "--multirun", "trainer.steps=1,2")
    assert done.returncode == 0, done.stderr
    assert "sweep: 2 of 2 runs submitted" in done.stdout
    runs = [RunDirectory(path.parent) for path in (tmp_path / "here").glob("runs/20*/*/config.yaml")]
    assert sorted(run.load_config().trainer.steps for run in runs) == [1, 2]
    for run in runs:
        assert Job.open(run) is not None
        assert prorl("stop", "--now", str(run.path)).returncode in (0, 1)
