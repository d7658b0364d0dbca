"""How far the engine's logprobs of the trained tokens are from the trainer's, as a short run reports it at every step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.inference.factory import resolve_engine
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.metrics import MetricsLog

_GOAL = 1e-3
_LIMIT_S = 1800.0
_LAUNCH = "launch"
_SETTINGS = (
    "experiment=quick",
    "engine=vllm",
    "engine.dtype=float32",
    "trainer.dtype=float32",
    "sandbox=local",
    "trainer.eval_prompts=8",
)


def figures(steps: Sequence[dict[str, Any]]) -> list[Figure]:
    """Of the trainer's records of steps. RunError if none was trained."""
    trained = [record for record in steps if record.get("tokens_trained")]
    if not trained:
        raise RunError("no step was trained: no group had different rewards")
    gaps = [float(record["logprob_gap_mean"]) for record in trained if "logprob_gap_mean" in record]
    if not gaps:
        raise RunError("the trainer's records of its steps have no logprob_gap_mean")
    tokens = sum(record["tokens_trained"] for record in trained)
    largest = max(float(record.get("logprob_gap_max", 0.0)) for record in trained)
    how = (
        f"experiment=quick, float32; by step: {', '.join(f'{gap:.1e}' for gap in gaps)}; largest on one token {largest:.1e}; "
        f"{tokens} tokens trained"
    )
    return [
        Figure.below(
            "mean |logprob(engine) - logprob(trainer)|, worst step", max(gaps), _GOAL, "nats", "the goal", how
        ),
        Figure.exactly("trained steps that do not report it", len(trained) - len(gaps), 0, "steps", "metrics.jsonl"),
    ]


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError if the run fails, ConfigError without vLLM."""
    resolve_engine("vllm")
    steps = 2 if quick else 8
    with scratch_directory() as directory, Processes(directory) as processes:
        root = directory / "runs"
        places = (f"run.root={root}", f"run.runtime_root={directory}", f"trainer.steps={steps}")
        processes.start(_LAUNCH, [sys.executable, "-m", "prorl_hpc", "launch", *_SETTINGS, *places])
        say(f"a run of {steps} steps")
        _wait(processes, root, say)
        return figures(_steps(root))


def _wait(processes: Processes, root: Path, say: Say) -> None:
    """Until the run has ended well."""
    told, deadline = 0, time.monotonic() + _LIMIT_S
    while processes.runs(_LAUNCH) and time.monotonic() < deadline:
        for record in _steps(root)[told:]:
            told += 1
            say(f"step {record['step']}: mean difference {record.get('logprob_gap_mean', 'not reported')}")
        time.sleep(1.0)
    if (code := processes.wait(_LAUNCH, 1.0)) != 0:
        raise RunError(f"the run ended with exit code {code}; its last lines:\n{processes.tail(_LAUNCH)}")


def _steps(root: Path) -> list[dict[str, Any]]:
    """None while there is no run yet."""
    runs = {path.resolve() for path in root.glob("*/*") if (path / "config.yaml").is_file()}
    records = [record for run in runs for record in MetricsLog(RunDirectory(run).metrics_file).read()]
    return [record for record in records if record["kind"] == "step"]
