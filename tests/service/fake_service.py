"""A RolloutService in memory: faithful to the protocol, with nothing behind it. Rollouts end at once, unless held."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from prorl_hpc.core.groups import BatchSampler, Moves
from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import (
    NumberedResult,
    RolloutProgress,
    RolloutResult,
    RolloutSpec,
    Stage,
    StageTiming,
    Status,
)
from prorl_hpc.messages.status import PolicyStatus, RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory
from prorl_hpc.rollout.metrics import CoordinatorMetrics
from prorl_hpc.service.errors import Refusal, conflict, not_found

TRAJECTORY = Trajectory(
    [Segment([1, 2]), Segment([3], [-0.5], True, 0)], [Message("user", "go"), Message("assistant", "gone")]
)


class FakeService:
    """``held``: rollouts stay in RUN until ``release``. ``refuse`` is raised, once, by the next submission."""

    def __init__(self, tasks: Collection[str] = ("t",), max_live: int = 1000) -> None:
        self.tasks: Collection[str] = tasks
        self._choice = PolicyChoice(("policy", "other"))
        self.policies: Collection[str] = self._choice.names
        self.reward: Callable[[RolloutSpec], float] = lambda spec: float(spec.sample % 2)
        self.trajectory = TRAJECTORY
        self.held = False
        self.refuse: ServiceError | None = None
        self.closed = False
        self.workers: dict[str, WorkerStatus] = {}
        self.servers: dict[str, ServerStatus] = {}
        self.outside: dict[str, OutsideServer] = {}
        self.specs: dict[str, RolloutSpec] = {}
        self._max_live = max_live
        self._paused = False
        self._holds: dict[str, float] = {}
        self._orders: dict[str, BatchSpec] = {}
        self._samplers: dict[str, BatchSampler] = {}
        self._batch_of: dict[str, str] = {}
        self._live: dict[str, RolloutProgress] = {}
        self._ended: dict[str, RolloutResult] = {}
        self._results: list[NumberedResult] = []
        self._newest: WeightUpdate | None = None
        self.waiting: list[asyncio.Future[None]] = []
        self._metrics = CoordinatorMetrics()

    # what tests do to it

    def add_worker(self, worker_id: str = "w0") -> None:
        self.workers[worker_id] = WorkerStatus(worker_id, "node", "fake", {"run": [0, 16]})

    def add_own_server(self, server_id: str = "s0") -> None:
        self.servers[server_id] = ServerStatus(server_id, "node", "fake", "m", True, 0, 0, 0, 0, 0, 0.0)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self._advance()

    async def close(self) -> None:
        self.closed = True
        self._wake()

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        known = self._orders.get(spec.batch_id)
        if known is None:
            self._admit(spec.policy, spec.group_size * (spec.max_parallel_groups or spec.groups_wanted))
            self._orders[spec.batch_id] = spec
            sampler = self._samplers[spec.batch_id] = BatchSampler(spec, 0.0, choice=self._choice)
            self._move(spec.batch_id, sampler.begin(0.0))
            self._advance()
        elif known != spec:
            raise conflict(f"batch {spec.batch_id!r} was ordered before with other contents", "batch_differs")
        return await self.batch_progress(spec.batch_id)

    async def batch_progress(self, batch_id: str) -> BatchProgress:
        return self._sampler(batch_id).progress()

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        sampler = self._sampler(batch_id)
        await self._until(lambda: sampler.finished_all, wait_s)
        return sampler.result() if sampler.finished_all else sampler.progress()

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        sampler = self._sampler(batch_id)
        if sampler.state not in (BatchState.RUNNING, BatchState.CANCELLED):
            raise conflict(f"batch {batch_id!r} is over ({sampler.state})", "already_finished", state=sampler.state)
        self._move(batch_id, sampler.cancel(0.0))
        self._wake()
        return sampler.progress()

    async def list_batches(self, after: str, limit: int) -> list[BatchProgress]:
        ids = _behind(self._orders, after, limit, "batch")
        return [self._samplers[batch_id].progress() for batch_id in ids]

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        new = [spec for spec in specs if spec.rollout_id not in self.specs]
        for spec in specs:
            if self.specs.get(spec.rollout_id, self._chosen(spec)) != self._chosen(spec):
                raise conflict(f"rollout {spec.rollout_id!r} was ordered before, otherwise", "rollout_differs")
        for spec in new:
            self._admit(spec.policy, len(new))
        self._open([self._chosen(spec) for spec in new], "")
        self._advance()
        return [self._progress(spec.rollout_id) for spec in specs]

    async def rollout_progress(self, rollout_id: str) -> RolloutProgress:
        return self._progress(rollout_id)

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress:
        self._progress(rollout_id)
        await self._until(lambda: rollout_id in self._ended, wait_s)
        return self._ended.get(rollout_id) or self._progress(rollout_id)

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        progress = self._progress(rollout_id)
        if not progress.status.terminal:
            self._end(rollout_id, Status.CANCELLED)
            self._wake()
        elif progress.status is not Status.CANCELLED:
            raise conflict(f"rollout {rollout_id!r} is over", "already_finished", status=progress.status)
        return self._progress(rollout_id)

    async def list_rollouts(
        self, status: Status | None, batch_id: str, policy: str, after: str, limit: int
    ) -> list[RolloutProgress]:
        found = {}
        for rollout_id in itertools.chain(self._live, self._ended):
            progress = self._progress(rollout_id)
            wanted = status in (None, progress.status) and policy in ("", progress.policy)
            if wanted and batch_id in ("", progress.batch_id):
                found[rollout_id] = progress
        if after and after not in found:
            raise not_found("rollout", after)
        return [found[rollout_id] for rollout_id in _behind(found, after, limit, "rollout")]

    async def results(self, cursor: int, limit: int, wait_s: float, batch_id: str, policy: str) -> list[NumberedResult]:
        def found() -> list[NumberedResult]:
            behind = (numbered for numbered in self._results if numbered.cursor > cursor)
            mine = (
                n
                for n in behind
                if batch_id in ("", self._batch_of[n.result.rollout_id]) and policy in ("", n.result.policy)
            )
            return list(itertools.islice(mine, limit))

        await self._until(lambda: bool(found()), wait_s)
        return found()

    # the run

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        newest = self._newest
        if newest is not None and (
            update.version < newest.version or (update.version == newest.version and update != newest)
        ):
            raise conflict(f"version {newest.version} was published before", "stale_version", newest=newest.version)
        if not self.servers:
            raise ServiceError("there is no LLM server", code="no_servers", status=503)
        self._newest = update
        for name in self.servers:
            self._change(self.servers, name, weight_version=update.version)
        return [WeightUpdated(update.version, name, 0.0) for name in sorted(self.servers)]

    async def drain_worker(self, worker_id: str, on: bool) -> WorkerStatus:
        return self._change(self.workers, worker_id, "worker", draining=on)

    async def add_server(self, server: OutsideServer) -> ServerStatus:
        known = self.outside.get(server.server_id)
        if server.server_id in self.servers and known != server:
            raise conflict(f"another server has the id {server.server_id!r}", "server_differs")
        if "no-ids" in server.url:
            raise Refusal("the server gives no token ids", code="unfit_server", status=422)
        if known is None:
            self.outside[server.server_id] = server
            self.servers[server.server_id] = ServerStatus(
                server.server_id, "", "outside", server.model, True, server.weight_version or 0, 0, 0, 0, 0, 0.0,
                policy=server.policy, url=server.url,
            )  # fmt: skip
            self._advance()
        return self.servers[server.server_id]

    async def drain_server(self, server_id: str, on: bool) -> ServerStatus:
        return self._change(self.servers, server_id, "server", draining=on)

    async def remove_server(self, server_id: str) -> None:
        if server_id not in self.servers:
            raise not_found("server", server_id)
        if server_id not in self.outside:
            raise conflict(f"{server_id!r} is of this run: drain it instead", "own_server")
        del self.servers[server_id], self.outside[server_id]

    async def pause(self, on: bool) -> RunStatus:
        self._paused = on
        self._advance()
        return self.status()

    async def pause_for(self, holder: str, for_s: float) -> RunStatus:
        loop = asyncio.get_running_loop()
        self._holds[holder] = loop.time() + for_s
        loop.call_later(for_s + 0.01, self._advance)
        self._advance()
        return self.status()

    def _held(self) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        return {holder: until - now for holder, until in self._holds.items() if until > now}

    def status(self) -> RunStatus:
        all_of = [*self._live.values(), *(self._progress(rollout_id) for rollout_id in self._ended)]
        counts = {status.value: sum(progress.status is status for progress in all_of) for status in Status}
        version = self._newest.version if self._newest else 0
        policies = [
            PolicyStatus(policy, version, len(servers), len(servers)) for policy, servers in self._by_policy().items()
        ]
        batches = [sampler.progress() for sampler in self._samplers.values()]
        workers, servers = list(self.workers.values()), list(self.servers.values())
        return RunStatus(
            "run-1", 0.0, 0.0, counts, workers, servers, batches, 0.0, self._paused, policies, holds=self._held()
        )

    def metrics(self) -> bytes:
        return self._metrics.render(self.status())

    # machinery

    def _by_policy(self) -> dict[str, list[ServerStatus]]:
        ordered = sorted(self.servers.values(), key=lambda server: server.policy)
        return {policy: list(servers) for policy, servers in itertools.groupby(ordered, lambda server: server.policy)}

    def _admit(self, policy: str, more: int) -> None:
        refuse, self.refuse = self.refuse, None
        if refuse is not None:
            raise refuse
        if self.closed:
            raise _shutting_down()
        if len(self._live) + more > self._max_live:
            raise ServiceError("too many rollouts are under way: try later", code="queue_full", status=429)
        if not self.workers:
            raise ServiceError("there is no worker", code="no_workers", status=503)
        for wanted in self._choice.may_become(policy):
            if wanted not in self._by_policy():
                raise ServiceError(f"no LLM server serves {wanted!r}", code="no_servers", status=503)

    def _chosen(self, spec: RolloutSpec) -> RolloutSpec:
        policy = self._choice.resolve(spec.policy, spec.group_id or spec.rollout_id)
        return msgspec.structs.replace(spec, policy=policy)

    def _open(self, specs: Iterable[RolloutSpec], batch_id: str) -> None:
        for spec in specs:
            self.specs[spec.rollout_id] = spec
            self._batch_of[spec.rollout_id] = batch_id
            self._live[spec.rollout_id] = RolloutProgress(
                spec.rollout_id, Status.QUEUED, batch_id=batch_id, policy=spec.policy
            )
            self._metrics.accepted(1)

    def _move(self, batch_id: str, moves: Moves) -> None:
        self._open(moves.submit, batch_id)
        for rollout_id in moves.cancel:
            if rollout_id in self._live:
                self._end(rollout_id, Status.CANCELLED)

    def _advance(self) -> None:
        """Everything that may go on does."""
        waiting = (
            deque(self._live)
            if not self._paused and not self._held() and self.workers and self.servers
            else deque[str]()
        )
        while waiting:
            rollout_id = waiting.popleft()
            if rollout_id not in self._live:
                continue  # cancelled by what came before
            server = next(iter(self.servers))
            self._live[rollout_id] = msgspec.structs.replace(
                self._live[rollout_id], status=Status.RUN, worker="w0", server=server
            )
            if not self.held:
                self._end(rollout_id, Status.DONE)
                waiting.extend(name for name in self._live if name not in waiting)
        self._wake()

    def _end(self, rollout_id: str, status: Status) -> None:
        spec, progress, batch_id = self.specs[rollout_id], self._live.pop(rollout_id), self._batch_of[rollout_id]
        done = status is Status.DONE
        result = RolloutResult(
            rollout_id, spec.group_id, spec.sample, spec.task, status,
            reward=self.reward(spec) if done else None, trajectory=self.trajectory if done else Trajectory(),
            timings=[StageTiming(stage, 0.5, 1.0) for stage in Stage] if done else [],
            worker=progress.worker, server=progress.server, row_id=str(spec.row.get("id", "")),
            policy=spec.policy,
        )  # fmt: skip
        self._ended[rollout_id] = result
        self._results.append(NumberedResult(len(self._results) + 1, result))
        self._metrics.ended(result)
        if batch_id:
            self._move(batch_id, self._samplers[batch_id].finished(result, 0.0))

    def _sampler(self, batch_id: str) -> BatchSampler:
        if batch_id not in self._samplers:
            raise not_found("batch", batch_id)
        return self._samplers[batch_id]

    def _progress(self, rollout_id: str) -> RolloutProgress:
        if rollout_id in self._live:
            return self._live[rollout_id]
        if rollout_id not in self._ended:
            raise not_found("rollout", rollout_id)
        result = self._ended[rollout_id]
        batch_id = self._batch_of[rollout_id]
        return RolloutProgress(
            rollout_id, result.status, result.attempts, result.worker, result.server, batch_id, result.policy
        )

    def _change(self, kept: dict[str, Any], name: str, kind: str = "server", **changes: Any) -> Any:
        if name not in kept:
            raise not_found(kind, name)
        kept[name] = msgspec.structs.replace(kept[name], **changes)
        return kept[name]

    async def _until(self, holds: Callable[[], bool], wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not (self.closed or holds()):
                    waiter = asyncio.get_running_loop().create_future()
                    self.waiting.append(waiter)
                    try:
                        await waiter
                    finally:
                        if waiter in self.waiting:
                            self.waiting.remove(waiter)
        except TimeoutError:
            return
        if self.closed and not holds():
            raise _shutting_down()

    def _wake(self) -> None:
        waiters, self.waiting = self.waiting, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _behind(names: Iterable[str], after: str, limit: int, kind: str) -> list[str]:
    ordered = list(names)
    if after and after not in ordered:
        raise not_found(kind, after)
    start = ordered.index(after) + 1 if after else 0
    return ordered[start : start + limit]


def _shutting_down() -> ServiceError:
    return ServiceError("the rollout service is shutting down", code="shutting_down", status=503)
