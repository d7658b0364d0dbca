"""How the tests of the examples start a service, and run programs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import Phase, ProcessState

EXAMPLES = Path(__file__).parents[2] / "examples"
START_S = 240.0
# One thread each: the service and the trainer share few cores, and the model is tiny.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def prorl(*words: str, cwd: Path | None = None) -> None:
    command = [sys.executable, "-m", "prorl_hpc", *words]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def run_example(python: Path | str, script: Path, *words: str, cwd: Path | None = None) -> str:
    """What it printed; it has to end well."""
    command = [str(python), "-W", "ignore", str(script), *words]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def rollout_service(place: Path) -> Iterator[RunDirectory]:
    """A run without a trainer in ``place``/runs, all of whose processes are ready: everything real but the size of the
    model, sandboxes as plain processes."""
    prorl("model", "prepare", "tiny")
    overrides = ["experiment=quick", "engine=transformers", "sandbox=local", f"run.root={place / 'runs'}"]
    prorl("serve", *overrides, "--detach", cwd=place)
    run = RunDirectory.open(place / "runs" / "latest")
    try:
        deadline = time.monotonic() + START_S
        while phases(run) != [Phase.READY] * 3:
            assert time.monotonic() < deadline, f"the service is not ready: {phases(run)}"
            time.sleep(0.2)
        yield run
    finally:
        prorl("stop", str(run.path))


def phases(run: RunDirectory) -> list[Phase | None]:
    states = [read_json(run.process_state(n), ProcessState) for n in ("coordinator", "worker-0", "inference-0")]
    return [state.phase if state is not None else None for state in states]
