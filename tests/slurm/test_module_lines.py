"""The lines that load modules, run by a shell as batch script, step and supervisor do."""

from __future__ import annotations

import subprocess

from prorl_hpc.slurm.script import setup_lines


def run_lines(*before: str) -> subprocess.CompletedProcess[str]:
    lines = [*before, *setup_lines(["cuda/12.4", "it's"], ["echo went on"])]
    return subprocess.run(["bash", "-c", "\n".join(["set -e", *lines])], capture_output=True, text=True, timeout=20)


def test_a_node_without_modules_is_told_by_the_setting_and_ends() -> None:
    done = run_lines("unset -f module", "command() { [ $2 != module ]; }")
    assert done.returncode == 127
    assert done.stderr.startswith("cluster.modules=cuda/12.4,it's: this node has no command named module")
    assert "went on" not in done.stdout


def test_modules_are_loaded_where_there_is_the_command() -> None:
    done = run_lines('module() { echo "module $*"; }')
    assert (done.returncode, done.stdout) == (0, "module load cuda/12.4 it's\nwent on\n"), done.stderr
