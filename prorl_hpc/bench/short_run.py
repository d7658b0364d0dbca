"""A run of a few steps, launched as a user does, and what its trainer has recorded of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.metrics import MetricsLog

_LAUNCH = "launch"
_LIMIT_S = 3600.0


def recorded_steps(settings: Sequence[str], say: Say, words: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """``prorl-hpc launch`` with ``settings``, to its end; the records of all steps. ``words`` makes of each what is told when
    it is done. RunError if the run fails; nothing of it is left."""
    with scratch_directory() as directory, Processes(directory) as processes:
        root = directory / "runs"
        places = (f"run.root={root}", f"run.runtime_root={directory}")
        processes.start(_LAUNCH, [sys.executable, "-m", "prorl_hpc", "launch", *settings, *places])
        told, deadline = 0, time.monotonic() + _LIMIT_S
        while processes.runs(_LAUNCH) and time.monotonic() < deadline:
            for record in _steps(root)[told:]:
                told += 1
                say(f"step {record['step']}: {words(record)}")
            time.sleep(1.0)
        if (code := processes.wait(_LAUNCH, 1.0)) != 0:
            raise RunError(f"the run ended with exit code {code}; its last lines:\n{processes.tail(_LAUNCH)}")
        return _steps(root)


def _steps(root: Path) -> list[dict[str, Any]]:
    """None while there is no run yet."""
    runs = {path.resolve() for path in root.glob("*/*") if (path / "config.yaml").is_file()}
    records = [record for run in runs for record in MetricsLog(RunDirectory(run).metrics_file).read()]
    return [record for record in records if record["kind"] == "step"]
