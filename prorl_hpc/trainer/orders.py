"""What the loop orders from the rollout service: batches to train on, and held-out evaluations."""

from __future__ import annotations

from typing import Any

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchSpec, GroupFilter, WhenFull
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.trainer.prompts import Row


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
        min_usable_samples=1,
    )


def _order(config: ProrlConfig, batch_id: str, rows: list[Row], **more: Any) -> BatchSpec:
    return BatchSpec(batch_id=batch_id, task=config.task.name, rows=rows, client="trainer", **more)


def _sampling(config: ProrlConfig, temperature: float, top_p: float, salt: int) -> SamplingParams:
    """The seed of a batch; each turn of each sample draws from one of its own, derived from it."""
    seed = (config.run.seed * 1_000_003 + salt) % 2**31
    return SamplingParams(temperature, top_p, config.task.max_turn_tokens, seed)
