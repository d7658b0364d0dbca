"""Updates whose loss or gradient is no finite number: they never reach the weights, are told, and end a run that makes no others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.loss_sums import LossSums

log = logging.getLogger(__name__)

STEPS = 3
"""In a row of which every update was skipped: what makes them so is in the weights, the settings or all the data."""


@dataclass(frozen=True)
class Update:
    """``sums``: of this rank. ``norm``: of the gradient before clipping, of all ranks; None: no step was made by it."""

    sums: LossSums
    norm: float | None


class SkippedUpdates:
    """Of one attempt; the same on all ranks, for all skip the same updates."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config, self._in_a_row = config, 0

    def count(self, skipped: int, updates: int, learning_rate: float, loss: float) -> None:
        """After a step of ``updates`` of which ``skipped`` were left out; ``loss`` is the sum of those left out. RunError at the
        ``STEPS``-th step in a row in which all were."""
        if skipped < updates:
            self._in_a_row = 0
        if not skipped:
            return
        told = f"(their loss: {loss:g}, learning rate {learning_rate:g})"
        log.warning(
            "%d of %d updates of this step skipped, for the loss or the gradient is not finite %s: the weights stay as they "
            "are. %s",
            skipped,
            updates,
            told,
            self._look_at(),
        )
        if skipped == updates:
            self._in_a_row += 1
        if self._in_a_row >= STEPS:
            raise RunError(
                f"every update of the last {STEPS} steps was skipped, for the loss or the gradient was not finite {told}: "
                f"training is at a standstill, with the weights of the last good step. {self._look_at()}"
            )

    def _look_at(self) -> str:
        config = self._config
        return (
            "Look at grad_norm, logprob_gap_max and entropy of the steps before in metrics.jsonl: rising ones ask for a lower "
            f"trainer.learning_rate (now {config.learning_rate:g}) or trainer.max_grad_norm (now {config.max_grad_norm:g}), a "
            f"large gap for trainer.proximal=trainer with a trainer.correction (now {config.proximal}, {config.correction})"
        )
