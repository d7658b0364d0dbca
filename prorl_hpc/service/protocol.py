"""What the HTTP face needs of the coordinator behind it. All methods raise ServiceError."""

from __future__ import annotations

from typing import Protocol

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.messages.status import RunStatus


class RolloutService(Protocol):
    """Calls answer at once unless they are coroutines."""

    def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        """Accept a batch; the same id again is the same batch (409 if the order differs)."""
        ...

    def batch_progress(self, batch_id: str) -> BatchProgress: ...

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        """The result as soon as it is there, or after ``wait_s`` how far it is."""
        ...

    def cancel_batch(self, batch_id: str) -> BatchProgress: ...

    def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        """Accept all or, with an error, none."""
        ...

    def rollout_progress(self, rollout_id: str) -> RolloutProgress: ...

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress: ...

    def cancel_rollout(self, rollout_id: str) -> RolloutProgress: ...

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        """Returns when every server has answered, or is gone."""
        ...

    def status(self) -> RunStatus: ...
