"""What the loop orders from the rollout service: batches to train on, and held-out evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.messages.batch import BatchResult, BatchSpec, BatchState, GroupFilter, WhenFull
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.trainer.prompts import Row
from prorl_hpc.trainer.rollout_service import RolloutService

EVALUATION_PRIORITY = 40
"""Before the batches that are made ahead, at 50: the trainer waits for it."""


@dataclass(frozen=True)
class Ordered:
    """``has_head_start``: an attempt before this one has made some of it, or all."""

    result: BatchResult
    has_head_start: bool


async def ordered(service: RolloutService, spec: BatchSpec, run: Path) -> Ordered:
    """Order ``spec`` and wait for it. Raises RunError if it ends otherwise than done, or was ordered otherwise before."""
    try:
        known = await service.submit_batch(spec)
    except ServiceError as error:
        if error.code != "batch_differs":
            raise
        raise RunError(
            f"batch {spec.batch_id} was ordered otherwise by an earlier attempt of this run: its configuration or its "
            f"data were changed since. Undo that, or go on with `prorl-hpc resume --fresh {run}`, "
            "which discards the recorded rollouts of steps that no checkpoint has"
        ) from error
    made = known.rollouts_done + known.rollouts_failed > 0 and not known.carried_in
    result = await service.wait_batch(spec.batch_id)
    if result.progress.state not in (BatchState.DONE, BatchState.EXHAUSTED):
        raise RunError(f"batch {spec.batch_id} ended {result.progress.state}, and nobody here asked for that")
    return Ordered(result, made or known.state is not BatchState.RUNNING)


def batches_ahead(settings: TrainerConfig) -> int:
    """How many batches may lie between generation and training. With ``when_full=carry`` a group may begin a batch before the
    one that it ends in, which takes one of the versions that ``staleness`` allows."""
    return max(0, settings.staleness - (settings.when_full == WhenFull.CARRY))


def training_order(config: ProrlConfig, step: int, rows: list[Row]) -> BatchSpec:
    """The batch of optimizer step ``step`` (from 1), to be filled from ``rows`` in order."""
    settings = config.trainer
    return _order(
        config,
        f"step-{step}",
        rows,
        groups_wanted=settings.groups_per_step,
        group_size=settings.group_size,
        filter=GroupFilter.INFORMATIVE if settings.dynamic_sampling else GroupFilter.ALL,
        sampling=_sampling(config, settings.temperature, settings.top_p, 2 * step),
        max_parallel_groups=settings.max_parallel_groups,
        when_full=WhenFull(settings.when_full),
    )


def evaluation_order(config: ProrlConfig, step: int, rows: list[Row]) -> BatchSpec:
    """Every row counts. The same seed at every evaluation: they differ by the weights alone."""
    settings = config.trainer
    return _order(
        config,
        f"eval-{step}",
        rows,
        groups_wanted=len(rows),
        group_size=settings.eval_samples,
        filter=GroupFilter.ALL,
        sampling=_sampling(config, settings.eval_temperature, 1.0, 1),
        priority=EVALUATION_PRIORITY,
        min_usable_samples=1,
    )


def _order(config: ProrlConfig, batch_id: str, rows: list[Row], **more: Any) -> BatchSpec:
    return BatchSpec(batch_id=batch_id, task=config.task.name, rows=rows, client="trainer", **more)


def _sampling(config: ProrlConfig, temperature: float, top_p: float, salt: int) -> SamplingParams:
    """The seed of a batch; each turn of each sample draws from one of its own, derived from it."""
    seed = (config.run.seed * 1_000_003 + salt) % 2**31
    return SamplingParams(temperature, top_p, config.task.max_turn_tokens, seed)
