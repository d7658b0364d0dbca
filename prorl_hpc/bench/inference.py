"""``bench inference``: what lies between a rollout and its engine, and what of its tokens reaches the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prorl_hpc.bench import (
    inference_abort,
    inference_drift,
    inference_encoding,
    inference_gap,
    inference_path,
    inference_sticky,
)
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "encoding": "CPU time of an inference agent for a prompt of 30,000 tokens, its engine a stub",
    "path": "a worker's request for one token through its agent, against vLLM's own HTTP on the same socket",
    "abort": "from a rollout's cancellation until its engine is idle",
    "sticky": "prefix-cache hits and turns per second on two servers, against round-robin per request",
    "drift": "tokens of sampled rollouts that are not those of the engine, against conversations kept as text",
    "gap": "logprobs of the trainer against those of the engine, at every step of a short run",
}
_MEASURES: dict[str, Callable[[bool, Say], list[Figure]]] = {
    "encoding": inference_encoding.measure,
    "path": inference_path.measure,
    "abort": inference_abort.measure,
    "sticky": inference_sticky.measure,
    "drift": inference_drift.measure,
    "gap": inference_gap.measure,
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    return measure_parts(PARTS, parts, say, lambda part: _MEASURES[part](quick, say))
