"""How much of its time the trainer waits for rollouts, with and without rollouts that are made while it learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.short_run import recorded_steps
from prorl_hpc.inference.factory import resolve_engine
from prorl_hpc.messages.errors import RunError

_GOAL = 0.2
_SETTINGS = ("trainer=async", "engine=vllm", "trainer.eval_prompts=8", "trainer.checkpoint_every=1000")
"""The default run's model, task and batch; the preset for asynchronous training, with both values of staleness."""


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model or if a run fails, ConfigError without vLLM."""
    resolve_engine("vllm")
    small_model("smollm2-135m")
    steps = 3 if quick else 6
    found = {}
    for staleness in (0, 1):
        say(f"a run of {steps} steps, trainer.staleness={staleness}")
        settings = [*_SETTINGS, f"trainer.steps={steps}", f"trainer.staleness={staleness}"]
        found[staleness] = recorded_steps(settings, say, _words)
    return figures(found[0], found[1])


def figures(synchronous: Sequence[dict[str, Any]], overlapping: Sequence[dict[str, Any]]) -> list[Figure]:
    """Of the records of all steps of each run."""
    before, now = idle_fraction(synchronous), idle_fraction(overlapping)
    how = (
        f"default run with {' '.join(_SETTINGS[:2])}; by step: {_by_step(overlapping)}; the first step, before which nothing is "
        "trained, and the time of saving count nowhere"
    )
    return [
        Figure.below("overlap: trainer idle, staleness=1", now, _GOAL, "of its time", "the goal", how),
        Figure.told(
            "overlap: trainer idle, staleness=0", before, "of its time", "", f"by step: {_by_step(synchronous)}"
        ),
        Figure.told(
            "overlap: a step with staleness=1",
            _step_s(overlapping) / _step_s(synchronous),
            "x",
            "staleness=0",
            f"{_step_s(overlapping):.1f} s against {_step_s(synchronous):.1f} s; rollouts and training share the cores",
        ),
    ]


def idle_fraction(steps: Sequence[dict[str, Any]]) -> float:
    """Share of waiting for rollouts in the time of all steps but the first one. RunError if there are no others."""
    later = _later(steps)
    return sum(_waited_s(record) for record in later) / sum(_busy_s(record) for record in later)


def _later(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    later = [record for record in steps if record["step"] > 1]
    if not later:
        raise RunError(f"the run has {len(steps)} steps: the waiting is measured from the second one on")
    return later


def _step_s(steps: Sequence[dict[str, Any]]) -> float:
    later = _later(steps)
    return sum(_busy_s(record) for record in later) / len(later)


def _waited_s(record: dict[str, Any]) -> float:
    return float(record["seconds"].get("rollouts", 0.0))


def _busy_s(record: dict[str, Any]) -> float:
    return float(record["seconds"]["total"]) - float(record["seconds"].get("saving", 0.0))


def _by_step(steps: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{_waited_s(record):.1f} of {_busy_s(record):.1f} s" for record in steps)


def _words(record: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items())
    return f"{phases}; {record.get('tokens_generated', 0)} tokens generated, {record.get('tokens_trained', 0)} trained"
