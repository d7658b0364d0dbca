"""The scripts of sbatch/: what they say at their heads, and that Slurm runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_hpc.slurm.private.base import PrivateSlurm

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
SCRIPTS = sorted(SBATCH.iterdir())
NODE_INIT = SBATCH.parent / "prorl_hpc" / "slurm" / "private" / "node_init.sh"
FAKES = SBATCH.parent / "tests" / "cli" / "prorl_with_fakes.py"
NEWER_THAN_20_11 = ("--gpus-per-task=", "--tres-per-task", "--external", "--oom-kill-step", "--segment")


@pytest.mark.parametrize("script", [*SCRIPTS, NODE_INIT], ids=lambda path: path.name)
def test_they_are_correct_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_their_heads_say_what_they_do_how_they_are_called_and_what_to_edit(script: Path) -> None:
    head = script.read_text().partition("\nset -")[0]
    assert "\n# Edit: " in head
    assert f"sbatch/{script.name}" in head
    if script.suffix == ".sbatch":
        assert "#SBATCH --time=" in head
        assert "PRORL_PYTHON" in head
    assert not [option for option in NEWER_THAN_20_11 if option in head]


@pytest.mark.slurm
@pytest.mark.parametrize("script", sorted(SBATCH.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_takes_their_heads(slurm_mini: PrivateSlurm, script: Path) -> None:
    asked = slurm_mini.run(["sbatch", "--test-only", str(script)])
    assert asked.returncode == 0, asked.stderr


class Submission:
    """One of the scripts as a job in a directory of its own."""

    def __init__(self, cluster: PrivateSlurm, place: Path, python: str, *words: str) -> None:
        self.cluster, self.place = cluster, place
        given = {
            "FAKE_ACTS": os.environ.get("FAKE_ACTS", "{}"),
            "PRORL_PYTHON": python,
            "PRORL_HOME": str(place / "home"),
            "PYTHONPATH": str(SBATCH.parent / "tests" / "slurm"),
        }
        submit = ["sbatch", "--parsable", "--output=job.out", *words]
        variables = [f"{key}={value}" for key, value in given.items()]
        done = cluster.run(["env", "-C", str(place), *variables, *submit])
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()

    @property
    def said(self) -> str:
        return (self.place / "job.out").read_text()

    def ends(self, timeout_s: float = 100.0) -> str:
        """Wait for it; returns Slurm's word for how it ended."""
        wait_for(lambda: self._state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), timeout_s)
        return self._state()

    def _state(self) -> str:
        return self.cluster.run(["squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T"]).stdout.strip()


def wait_for(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.1)


@pytest.fixture
def with_fakes(tmp_path: Path) -> str:
    """A Python whose ``-m prorl_hpc`` starts fake processes."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$1 $2" = "-m prorl_hpc" ] || exit 3\nshift 2\nexec {sys.executable} {FAKES} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


OVERRIDES = ("model=path", "model.path=/no/model", "run.stop_timeout_s=3")


@pytest.mark.slurm
def test_a_run_on_one_node_trains_to_its_end(
    slurm_mini: PrivateSlurm, tmp_path: Path, with_fakes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ACTS", json.dumps({"trainer-0": {"exit_after": 0.5, "finish": True}}))
    job = Submission(slurm_mini, tmp_path, with_fakes, str(SBATCH / "one_node.sbatch"), *OVERRIDES)
    assert job.ends() == "COMPLETED", job.said
    assert "report:" in job.said
    assert (tmp_path / "runs" / "latest" / "report.md").exists()


@pytest.mark.slurm
@pytest.mark.parametrize(("script", "processes"), [("one_node.sbatch", 4), ("serve.sbatch", 3)])
def test_before_the_time_limit_they_stop_in_order(
    slurm_mini: PrivateSlurm, tmp_path: Path, with_fakes: str, script: str, processes: int
) -> None:
    job = Submission(slurm_mini, tmp_path, with_fakes, str(SBATCH / script), *OVERRIDES)

    attempt = tmp_path / "runs" / "latest" / "attempts" / "1"

    def ready() -> bool:
        states = [path.read_text() for path in (attempt / "state").glob("*.json")]
        return sum('"ready"' in state for state in states) == processes

    wait_for(lambda: ready() or job._state() not in ("PENDING", "RUNNING"))
    assert slurm_mini.run(["scancel", "--batch", "--signal=TERM", job.job]).returncode == 0
    job.ends()
    ending = json.loads((attempt / "ending.json").read_text())
    assert ending["ending"] == "stopped", job.said
    assert "stop" in job.said


@pytest.mark.slurm
def test_images_are_brought_into_the_cache_in_a_job(slurm_mini: PrivateSlurm, tmp_path: Path) -> None:
    job = Submission(slurm_mini, tmp_path, sys.executable, str(SBATCH / "image.sbatch"), "build", "coding", "--show")
    assert job.ends() == "COMPLETED", job.said
    assert "Bootstrap:" in job.said
    empty = tmp_path / "empty"
    empty.mkdir()
    job = Submission(slurm_mini, empty, sys.executable, str(SBATCH / "image.sbatch"))
    assert job.ends() == "FAILED"
    assert "usage: sbatch sbatch/image.sbatch" in job.said


@pytest.mark.slurm
def test_benches_run_in_a_job(slurm_mini: PrivateSlurm, tmp_path: Path) -> None:
    words = ["soak", "rollouts=200", "workers=2", "coordinator_kills=1", "--json"]
    job = Submission(slurm_mini, tmp_path, sys.executable, str(SBATCH / "bench.sbatch"), *words)
    job.ends()
    (report,) = [json.loads(line) for line in job.said.splitlines() if line.startswith("{")]
    assert report["figures"]


@pytest.mark.slurm
def test_health_looks_at_every_node_and_names_the_bad_one(slurm_mini: PrivateSlurm, tmp_path: Path) -> None:
    python = tmp_path / "python"
    # doctor as it would be where one node fails and the other is nearly full
    warned = tmp_path / "warned"
    findings = [
        {"grade": "ok", "subject": "GPU", "found": "one", "cure": ""},
        {"grade": "warn", "subject": "disk", "found": "nearly full", "cure": "empty it"},
    ]
    warned.write_text(json.dumps({"grade": "warn", "findings": findings}))
    python.write_text(
        f"""#!/bin/bash
if [ "$1 $2 $3 $4" = "-m prorl_hpc doctor --json" ] && [ "$SLURMD_NODENAME" = cpu02 ]; then echo "no such disk" >&2; exit 1; fi
if [ "$1 $2 $3 $4" = "-m prorl_hpc doctor --json" ]; then
  cat {warned}
  exit 0
fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    job = Submission(
        slurm_mini, tmp_path, str(python), "--nodes=2", "-p", "cpu", "-w", "cpu[01-02]", str(SBATCH / "health.sbatch")
    )
    assert job.ends() == "FAILED"
    lines = [json.loads(line) for line in job.said.splitlines() if line.startswith("{")]
    assert {line["node"]: line["grade"] for line in lines}["cpu02"] == "fail"
    assert {line["node"] for line in lines} == {"cpu01", "cpu02"}
    assert "cpu01: warn\n  warn: disk: nearly full → empty it" in job.said
    assert "cpu02: fail\n  doctor: no such disk" in job.said
    assert "nodes can be used" in job.said


@pytest.mark.slurm
def test_a_small_job_follows_a_run_that_it_submits(
    slurm_mini: PrivateSlurm, tmp_path: Path, with_fakes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ACTS", json.dumps({"trainer-0": {"exit_after": 0.5, "finish": True}}))
    sizes = ["cluster.inference.partition=gpu", "cluster.trainer.partition=gpu", "cluster.rollout.partition=cpu"]
    job = Submission(slurm_mini, tmp_path, with_fakes, str(SBATCH / "launcher.sbatch"), *OVERRIDES, *sizes)
    assert job.ends() == "COMPLETED", job.said
    assert "report:" in job.said
    assert (tmp_path / "runs" / "latest" / "report.md").exists()
