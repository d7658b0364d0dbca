"""How far the engine's logprobs of the trained tokens are from the trainer's, as a short run reports it at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.short_run import recorded_steps
from prorl_hpc.inference.factory import resolve_engine
from prorl_hpc.messages.errors import RunError

_GOAL = 1e-3
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
    say(f"a run of {steps} steps")
    return figures(recorded_steps([*_SETTINGS, f"trainer.steps={steps}"], say, _words))


def _words(record: dict[str, Any]) -> str:
    return f"mean difference {record.get('logprob_gap_mean', 'not reported')}"
