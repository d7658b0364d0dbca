"""``bench trainer``: a training step against TRL's, new weights into a running engine, and how little the trainer waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prorl_hpc.bench import trainer_logprobs, trainer_overlap, trainer_publish, trainer_step
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "step": "tokens/s and peak memory of an optimizer step, against TRL's GRPOTrainer on the same batch",
    "publish": "new weights into a running vLLM, the whole way, against a copy of the same bytes",
    "overlap": "how much of its time the trainer waits for rollouts, with staleness 1 and 0",
    "logprobs": "memory and time of token logprobs, against log_softmax of all logits",
}
_MEASURES: dict[str, Callable[[bool, Say], list[Figure]]] = {
    "step": trainer_step.measure,
    "publish": trainer_publish.measure,
    "overlap": trainer_overlap.measure,
    "logprobs": trainer_logprobs.measure,
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    return measure_parts(PARTS, parts, say, lambda part: _MEASURES[part](quick, say))
