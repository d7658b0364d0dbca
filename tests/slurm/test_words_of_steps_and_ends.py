"""How a step's command line and the end of a process read, without Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.runs import fake_config, fake_run

from prorl_hpc.slurm.children import Child, stop_in_order
from prorl_hpc.slurm.plan import ProcessPlan
from prorl_hpc.slurm.steps import PlacedNode, srun_words


def child(tmp_path: Path) -> Child:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    return Child(ProcessPlan("worker-0", "worker", "worker"), process, tmp_path / "log", time.monotonic(), "token")


def test_a_process_that_was_told_to_end_was_not_killed(tmp_path: Path) -> None:
    told, killed = child(tmp_path), child(tmp_path)
    killed.process.terminate()
    killed.process.wait()
    stop_in_order([[told]], 20.0)
    assert told.process.returncode == killed.process.returncode == -signal.SIGTERM
    assert told.ending == "ended at SIGTERM, as it was told to"
    assert killed.ending == "was killed by SIGTERM"


@pytest.mark.parametrize(
    ("cpu_bind", "said"), [("", []), ("none", ["--cpu-bind=none"]), ("cores", ["--cpu-bind=cores"])]
)
def test_binding_is_left_to_slurm_unless_it_is_set(tmp_path: Path, cpu_bind: str, said: list[str]) -> None:
    config = fake_config(tmp_path, slurm=True)
    config.cluster.rollout.cpu_bind = cpu_bind
    words = srun_words(fake_run(config, {}), config.cluster, PlacedNode(0, "rollout", "cpu01", 0, "7"), 1)
    assert [word for word in words if word.startswith("--cpu-bind")] == said
