"""``run.runtime_root`` with variables that each node fills in itself."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure


def test_a_run_on_scratch_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="ps", dir="/tmp"))  # pytest's own paths are too long for sockets
    monkeypatch.setenv("SLURM_TMPDIR", str(scratch))
    config = fake_config(tmp_path)
    config.run.runtime_root = "$SLURM_TMPDIR"
    acts = {
        "worker-0": {"dump_environment": True},
        "trainer-0": {"exit_after": 1.0, "finish": True, "finish_after_starts": {"worker-0": 1}},
    }
    run = fake_run(config, acts)
    job = submit(run, config, fake_plan(config))
    assert job.wait(30)
    assert read_failure(run) is None
    assert json.loads((run.logs / "worker-0.env.json").read_text())["SLURM_TMPDIR"] == str(scratch)
    scratch.rmdir()  # it is empty
    assert processes_of(run) == []


def test_a_variable_that_a_node_has_not_is_named(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    config.run.runtime_root = "$NOBODY_SETS_THIS/x"
    run = fake_run(config, {})
    job = submit(run, config, fake_plan(config))
    assert job.wait(30)
    failure = read_failure(run)
    assert failure is not None
    assert "$NOBODY_SETS_THIS/x: a variable in it is not set on" in failure.what
    assert (run.state / "node-0.ended").exists()
