"""What the HTTP face needs of the coordinator behind it. All methods raise ServiceError."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import NumberedResult, RolloutProgress, RolloutResult, RolloutSpec, Status
from prorl_hpc.messages.status import RunStatus, ServerStatus, WorkerStatus


class RolloutService(Protocol):
    """What was accepted is on disk when the call returns. Ids of batches and rollouts are the client's: the same order
    again is the same batch or rollout, another one under a known id is refused (409)."""

    @property
    def tasks(self) -> Collection[str]:
        """Names of the tasks that the workers of this run serve."""
        ...

    @property
    def policies(self) -> Collection[str]:
        """Names of the policies of this run."""
        ...

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        """429 when the queue is full, 503 when no worker or no LLM server of the policy is there."""
        ...

    async def batch_progress(self, batch_id: str) -> BatchProgress: ...

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        """The result as soon as it is there, or after ``wait_s`` how far it is."""
        ...

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        """404 if it is unknown, 409 if it has ended otherwise."""
        ...

    async def list_batches(self, after: str, limit: int) -> list[BatchProgress]:
        """In the order of their acceptance, at most ``limit`` of those behind the batch ``after`` (empty: from the
        first). 404 if ``after`` is unknown."""
        ...

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        """Accept all or, with an error, none. Refusals as in ``submit_batch``."""
        ...

    async def rollout_progress(self, rollout_id: str) -> RolloutProgress:
        """Also of a rollout that a batch started."""
        ...

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress: ...

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        """404 if it is unknown, 409 if it has ended otherwise."""
        ...

    async def list_rollouts(
        self, status: Status | None, batch_id: str, policy: str, after: str, limit: int
    ) -> list[RolloutProgress]:
        """Those under way first, in the order of their acceptance, then those that ended, in the order of their end.
        ``status`` None, ``batch_id`` and ``policy`` empty: all. ``after`` and ``limit`` as in ``list_batches``."""
        ...

    async def results(self, cursor: int, limit: int, wait_s: float, batch_id: str, policy: str) -> list[NumberedResult]:
        """Results in the order in which they got onto disk, at most ``limit`` of those behind ``cursor`` (0: from the
        first); waits up to ``wait_s`` for the next if there is none. ``batch_id`` and ``policy`` empty: of
        all."""
        ...

    # the run

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        """Returns when every server has answered, or is gone."""
        ...

    async def drain_worker(self, worker_id: str, on: bool) -> WorkerStatus:
        """A draining worker gets no new rollouts. 404 if it is unknown."""
        ...

    async def add_server(self, server: OutsideServer) -> ServerStatus:
        """Register an outside server, after a probe; 422 with the reason if it will not do, 409 if another has the id.
        The same again is answered with the same."""
        ...

    async def drain_server(self, server_id: str, on: bool) -> ServerStatus:
        """A draining server gets no new rollouts. 404 if it is unknown."""
        ...

    async def remove_server(self, server_id: str) -> None:
        """Its rollouts go elsewhere. 404 if it is unknown, 409 for the run's own, which can only be drained."""
        ...

    async def pause(self, on: bool) -> RunStatus:
        """While paused, what is submitted is accepted and waits; what runs goes on. Lasts until it is taken back, also over
        restarts."""
        ...

    async def pause_for(self, holder: str, for_s: float) -> RunStatus:
        """A pause for ``for_s`` seconds from now that is ``holder``'s: beside the lasting one and those of others, neither of
        which it ends. 0 ends it. It is not on disk: a service that starts anew has forgotten it."""
        ...

    def status(self) -> RunStatus: ...

    def metrics(self) -> bytes:
        """In the Prometheus text format."""
        ...
