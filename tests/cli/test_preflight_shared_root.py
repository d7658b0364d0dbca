"""The warning that /tmp is each node's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.cli.preflight_slurm import slurm_warnings
from prorl_hpc.config.schema import ClusterConfig, ProrlConfig, RunSettings

ASK = "from pathlib import Path; from test_preflight_shared_root import warned; print(warned(Path({!r})))"


def warned(root: Path) -> bool:
    config = ProrlConfig(run=RunSettings(root=str(root)), cluster=ClusterConfig(kind="slurm"))
    return any("is each node's own" in words for words in slurm_warnings(config))


@pytest.mark.parametrize(("root", "own"), [("/tmp/runs", True), ("/dev/shm/runs", True), ("/scratch/runs", False)])
def test_directories_that_nodes_have_of_their_own_are_warned_of(root: str, own: bool) -> None:
    assert warned(Path(root)) is own


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_what_is_mounted_below_tmp_is_not(tmp_path: Path) -> None:
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip(f"{tmp_path} is not below /tmp")
    ask = [sys.executable, "-c", ASK.format(str(tmp_path / "runs"))]
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {tmp_path} && exec "$@"', "sh", *ask]
    done = subprocess.run(mounted, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.strip() == "False", done.stderr
