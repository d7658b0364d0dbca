"""The plan as a table, for each example of a site; PRORL_UPDATE_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl_hpc.cli.plan_view import dry_run, plan_text
from prorl_hpc.config.store import compose, conf_dir
from prorl_hpc.slurm.plan import make_plan

SITES = sorted(path.stem for path in (conf_dir() / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("site", SITES)
def test_the_plan_of_an_example(site: str) -> None:
    config = compose([f"cluster={site}", "model=tiny"])
    text = plan_text(config, make_plan(config)) + "\n"
    golden = Path(__file__).with_name(f"golden_plan_{site}.txt")
    if os.environ.get("PRORL_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_large_plan_stays_short() -> None:
    words = ["cluster=site_gpu", "cluster.rollout.nodes=64", "cluster.inference.nodes=32", "engine.servers_per_node=4"]
    config = compose(words)
    lines = plan_text(config, make_plan(config)).splitlines()
    assert len(lines) < 25
    assert any(line.startswith("node 63 (rollout): worker-63") for line in lines)
    assert "inference-127-vllm.sock (258 in all)" in "\n".join(lines)


@pytest.mark.parametrize(
    ("answer", "code", "refused"),
    [
        ("sbatch: Job 3 to start at 2026-01-01T00:00:00", 0, ""),
        ("allocation failure: Invalid partition name specified", 1, "cluster.trainer.partition=moon: give a partition"),
        (
            "sbatch: error: Unable to contact slurm controller (connect failure)",
            1,
            "not checked, for Slurm does not answer",
        ),
    ],
)
def test_a_dry_run_says_what_sbatch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, refused: str
) -> None:
    stub = tmp_path / "sbatch"
    stub.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {code}\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = compose(["cluster=slurm", "cluster.trainer.partition=moon"])
    shown = dry_run(config, make_plan(config))
    assert f"sbatch --test-only says: {answer}" in shown.text
    assert bool(shown.refused) is bool(refused) and refused in shown.refused
