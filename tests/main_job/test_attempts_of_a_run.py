"""A real run that is stopped in the midst of a batch and goes on as the next attempt, with the tiny model."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import RunStatus
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.observe.rollout_store import read_rollouts

pytest.importorskip("deepspeed", reason="the trainer needs the extra [train]")
pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.timeout(900)]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "prorl_hpc", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def in_the_midst(root: Path, attempt: int, process: subprocess.Popen[str]) -> RunDirectory:
    """Wait until a training batch has some rollouts and lacks others."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        for config in root.glob("*/*/config.yaml"):
            run = RunDirectory(config.parent, attempt)
            status = read_json(run.status_file, RunStatus)
            for batch in status.batches if status is not None else []:
                if batch.batch_id.startswith("step-") and batch.in_flight and batch.rollouts_done >= 3:
                    return RunDirectory(config.parent)
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"no batch was seen under way; it printed:\n{process.communicate()[0][-4000:]}")


def recorded(run: RunDirectory) -> dict[str, int]:
    """Rollout → cursor of what the journal has, of all batches."""
    with sqlite3.connect(f"file:{run.journal_file}?mode=ro", uri=True) as journal:
        found = dict(journal.execute("SELECT rollout, cursor FROM results").fetchall())
    journal.close()
    return found


def test_finished_rollouts_of_an_open_batch_are_not_run_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "prorl_hpc", "model", "prepare", "tiny"], check=True, timeout=400)
    steps = 3
    settings = ["experiment=quick", "engine=transformers", f"run.root={tmp_path}", f"trainer.steps={steps}"]
    process = start("launch", *settings, "rollout.run_slots=2")
    run = in_the_midst(tmp_path, 1, process)
    before: dict[str, int] = {}
    for attempt in (2, 3):
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        now = recorded(run)
        assert before.items() <= now.items(), output[-4000:]
        before = now
        process = start("resume", str(run.path))
        if attempt == 2:
            in_the_midst(tmp_path, attempt, process)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]

    rows = read_rollouts(run, ["rollout_id", "batch_id", "cursor", "attempts", "status"]).to_pylist()
    cursors = {row["rollout_id"]: row["cursor"] for row in rows}
    assert len(cursors) == len(rows)
    assert before.items() <= cursors.items(), "a recorded rollout was run again"
    assert {row["attempts"] for row in rows} == {1}, "being cut off used up a retry"
    done = Counter(row["batch_id"] for row in rows if row["status"] == "done")
    records = newest_per_step(MetricsLog(run.metrics_file).read(), "step")
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for record in records:
        assert record["rollouts"] == done[f"step-{record['step']}"]
        assert record["staleness"] == 0.0, "made by the weights of its step"
    assert sorted(path.name for path in run.attempts.iterdir()) == ["1", "2", "3", "latest"]
