"""What the trainer needs of the rollout service; prorl_hpc.service.client.RolloutClient has it, tests fake it."""

from __future__ import annotations

from typing import Protocol

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.status import RunStatus


class RolloutService(Protocol):
    """All coroutines raise ServiceError when the service refuses."""

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress: ...

    async def wait_batch(self, batch_id: str) -> BatchResult: ...

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]: ...

    async def pause(self) -> RunStatus:
        """Start no rollout until resumed; those under way go on."""
        ...

    async def resume(self) -> RunStatus: ...

    async def status(self) -> RunStatus: ...
