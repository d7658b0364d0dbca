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

    async def pause(self, holder: str, for_s: float) -> RunStatus:
        """Start no rollout until ``holder`` resumes, or ``for_s`` seconds from now; those under way go on."""
        ...

    async def resume(self, holder: str) -> RunStatus:
        """End ``holder``'s pause and nobody else's."""
        ...

    async def status(self) -> RunStatus: ...
