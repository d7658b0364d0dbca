"""stop: what it refuses, and what it says of processes that could not end in order; with a Slurm of shell scripts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fakes.runs import fake_config, fake_run

from prorl_hpc.__main__ import main
from prorl_hpc.cli.stop import what_stays
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.endings import NodeEnd, node_end_file, read_stop
from prorl_hpc.slurm.job import JobRecord
from prorl_hpc.slurm.steps import PlacedNode


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose job 5 is suspended until scancel ends it."""
    config = fake_config(tmp_path, slurm=True)
    config.run.drain_s, config.run.stop_timeout_s = 0.0, 0.1
    run = fake_run(config, {})
    write_json(run.jobs / "job.json", JobRecord("slurm", "5", "elsewhere", 0, time.time()))
    write_json(run.placement_file, [PlacedNode(rank, "all", f"node{rank}", 0, "5") for rank in range(3)])
    write_json(node_end_file(run, 0), NodeEnd(0, "node0"))
    write_json(node_end_file(run, 1), NodeEnd(1, "node1", left=["process 17"]))
    programs = tmp_path / "bin"
    programs.mkdir()
    squeue = f"test -e {tmp_path}/cancelled && echo '5|CANCELLED|None|N/A|0:00' || echo '5|SUSPENDED|None|N/A|1:00'"
    for name, script in {"squeue": squeue, "scancel": f"touch {tmp_path}/cancelled"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("prorl_hpc.cli.stop.MARGIN_S", 0.0)
    return run


@pytest.mark.parametrize("drain", ["inf", "nan", "-1", "1e400"])
def test_a_drain_without_end_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str], drain: str) -> None:
    assert main(["stop", str(run.path), f"--drain={drain}"]) == 2
    assert "give seconds" in capsys.readouterr().err
    assert read_stop(run) is None


def test_a_held_job_is_said_to_be_killed_and_to_leave_its_files(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", str(run.path)]) == 0
    said = capsys.readouterr()
    assert "Slurm job 5 is SUSPENDED" in said.out
    assert "no checkpoint is saved" in said.out
    root = run.load_config().run.runtime_root
    assert f"the processes on node2 were killed before they could remove their files: {root}/prorl-" in said.err
    assert "left on node1: process 17" in said.err
    assert "node0" not in said.err


def test_of_a_run_that_never_was_on_a_node_nothing_stays(run: RunDirectory) -> None:
    run.placement_file.unlink()
    assert what_stays(run, "/tmp") == []
