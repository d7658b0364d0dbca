"""The rollout service behind its HTTP face: orders in, results out, nothing forgotten.

Implements service.protocol.RolloutService. What happens is written to the journal in the order in which it happens;
what a client is told, and what a worker may forget, is on disk before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.events import Cancel, Ended, Event, Pause, Recover, Retried, ServerDrains, Submit, WorkerDrains
from prorl_hpc.core.groups import Moves
from prorl_hpc.core.life import attempt_id_of
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.control import AgentToCoordinator
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import (
    Budgets,
    NumberedResult,
    RolloutProgress,
    RolloutResult,
    RolloutSpec,
    Status,
)
from prorl_hpc.messages.status import RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.rollout.admission import Admission
from prorl_hpc.rollout.dispatch import Clock, Dispatch
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_orders import batch_of
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.rollout.metrics import CoordinatorMetrics
from prorl_hpc.rollout.orders import Orders, Over
from prorl_hpc.rollout.outbox import Outbox
from prorl_hpc.rollout.outside_servers import OutsideServers
from prorl_hpc.rollout.publications import Publications
from prorl_hpc.rollout.run_status import Rate, run_status
from prorl_hpc.rollout.waiters import Waiters
from prorl_hpc.service.errors import conflict, not_found
from prorl_hpc.transport.channels import RouterDoor

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK_S = 0.25
_STATUS_S = 1.0
_GOODBYE_S = 1.0
_GRACE_BEATS = 3
"""Heartbeats after a restart that workers have to say what they hold."""


class Coordinator:
    """``run`` until stopped. ``tasks``: the tasks that the workers serve."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        door: RouterDoor[AgentToCoordinator],
        journal: Journal,
        keepsakes: Keepsakes,
        *,
        status_file: Path,
        tasks: Collection[str],
        first_server_s: float = 600.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tasks = tasks
        self._run_id = run_id
        self._config = config
        self._door = door
        self._journal = journal
        self._status_file = status_file
        self._clock = clock
        self._began = clock()
        self._budgets = Budgets(config.init_s, config.run_s, config.eval_s, config.total_s, config.wall_s)
        self._orders = Orders(self._budgets)
        self._outbox = Outbox(door)
        self._publications = Publications(self._send_weights, keepsakes, first_server_s=first_server_s)
        self._dispatch = Dispatch(
            run_id,
            config,
            self._outbox,
            self._publications,
            on_ended=self._ended,
            on_retried=self._retried,
            clock=clock,
        )
        self._scheduler = self._dispatch.scheduler
        for policy, update in keepsakes.weights.items():
            self._scheduler.servers.require(policy, update.version)
        self._outside = OutsideServers(keepsakes, self._dispatch.tell, self._scheduler.servers.newest)
        self._admission = Admission(self._scheduler, self._dispatch.agents)
        self._metrics = CoordinatorMetrics(refused=lambda: door.refused)
        journal.on_commit = self._metrics.journal_committed
        self._rate = Rate()
        self._waiters = Waiters()
        self._accepting = asyncio.Lock()

    async def run(self, stop: asyncio.Event, reason: str = "the run is over") -> None:
        """Serve until ``stop``, then tell all agents to shut down. Raises what breaks it."""
        async with asyncio.TaskGroup() as group:
            works = (self._receive(), self._outbox.run(), self._tick(), self._watch(), self._write_status())
            tasks = [group.create_task(work) for work in (*works, self._outside.watch(), self._watch_journal())]
            await stop.wait()
            await self._end(reason)
            for task in tasks:
                task.cancel()

    async def resume(self) -> None:
        """Go on with what an earlier process of this job had accepted. Once, before ``run``."""
        found, paused = await self._journal.recover()
        self._scheduler.counts.update(await self._journal.ended_counts())
        resumed = self._orders.resume(found, self._clock())
        grace_s = _GRACE_BEATS * self._config.heartbeat_s
        self._dispatch.tell(Pause(paused), Recover(resumed.under_way, grace_s), *_events(resumed.moves))
        for over in resumed.over:
            self._finish(over)
        self._outside.restore()
        if found:
            log.info(
                "went on with %d orders and %d rollouts of an earlier process; workers have %g s to say what they hold",
                len(found),
                len(resumed.under_way),
                grace_s,
            )

    def take(self, peer: bytes, message: AgentToCoordinator) -> None:
        """A message from an agent."""
        self._dispatch.take(peer, message)

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        async with self._accepting:
            progress = await self._known_batch(spec.batch_id)
            if progress is not None:
                await self._journal.accept_batch(spec)  # the same, or refused
                return progress
            parallel = spec.max_parallel_groups or spec.groups_wanted
            self._admission.check(spec.group_size * parallel, {spec.policy})
            # Nothing may refuse it any more once it has the groups of another.
            await self._journal.require_free(spec.batch_id)
            closes, carried, before = self._orders.take_over(spec)
            await self._journal.accept_batch(spec, carried, closes)
            moves, over = self._orders.begin_batch(spec, self._clock(), carried, before)
        self._make(moves)
        if over is not None:
            self._finish(over)
        return await self.batch_progress(spec.batch_id)

    async def batch_progress(self, batch_id: str) -> BatchProgress:
        progress = await self._known_batch(batch_id)
        if progress is None:
            raise not_found("batch", batch_id)
        return progress

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        if self._orders.running(batch_id) is not None:
            await self._waiters.wait(("batch", batch_id), wait_s)
        return await self._journal.batch_result(batch_id) or await self.batch_progress(batch_id)

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        if self._orders.running(batch_id) is not None:
            noted = self._journal.cancelled_batch(batch_id)
            moves, over = self._orders.cancel_batch(batch_id, self._clock())
            self._make(moves)
            if over is not None:
                self._finish(over)
            await noted
        progress = await self.batch_progress(batch_id)
        if progress.state not in ("running", "cancelled"):
            message = f"batch {batch_id!r} is over ({progress.state}): there is nothing to cancel"
            raise conflict(message, "already_finished", state=progress.state)
        return progress

    async def list_batches(self, after: str, limit: int) -> list[BatchProgress]:
        return [await self.batch_progress(batch_id) for batch_id in await self._journal.batches(after, limit)]

    async def _known_batch(self, batch_id: str) -> BatchProgress | None:
        running = self._orders.running(batch_id)
        if running is not None:
            return running.progress()
        return await self._journal.batch_state(batch_id)

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        refusal = self._admission.why_not(len(specs), {spec.policy for spec in specs})
        if refusal is not None:
            # Said again, they are known, whatever would be refused now.
            known = [await self._known_rollout(spec.rollout_id) for spec in specs]
            if None in known:
                raise refusal
        if any(batch_of(spec.rollout_id) for spec in specs):
            async with self._accepting:  # a batch whose rollouts would have such ids
                new = await self._journal.accept_rollouts(specs)
        else:
            new = await self._journal.accept_rollouts(specs)
        begun = [spec for spec, is_new in zip(specs, new, strict=True) if is_new]
        self._make(self._orders.begin_rollouts(begun))
        return [await self.rollout_progress(spec.rollout_id) for spec in specs]

    async def rollout_progress(self, rollout_id: str) -> RolloutProgress:
        progress = await self._known_rollout(rollout_id)
        if progress is None:
            raise not_found("rollout", rollout_id)
        return progress

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress:
        if self._scheduler.life(rollout_id) is not None:
            await self._waiters.wait(("rollout", rollout_id), wait_s)
        if self._scheduler.life(rollout_id) is None:
            result = await self._journal.rollout_result(rollout_id)
            if result is not None:
                return result
        return await self.rollout_progress(rollout_id)

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        self._dispatch.tell(Cancel((rollout_id,)))
        progress = await self.rollout_progress(rollout_id)
        if progress.status is not Status.CANCELLED:
            message = f"rollout {rollout_id!r} is over ({progress.status}): there is nothing to cancel"
            raise conflict(message, "already_finished", status=progress.status)
        return progress

    async def list_rollouts(
        self, status: Status | None, batch_id: str, after: str, limit: int
    ) -> list[RolloutProgress]:
        listed: list[RolloutProgress] = []
        begun = not after or self._scheduler.life(after) is None
        if status is None or not status.terminal:
            skipping = not begun
            for life in self._scheduler.lives if not after or skipping else ():
                if skipping:
                    skipping = life.spec.rollout_id != after
                elif status in (None, life.status) and batch_id in ("", self._orders.batch_of(life.spec.rollout_id)):
                    listed.append(self._living(life.spec.rollout_id))
                if len(listed) == limit:
                    return listed
        if status is None or status.terminal:
            listed += await self._journal.ended(status, batch_id, after if begun else "", limit - len(listed))
        return listed

    async def results(self, cursor: int, limit: int, wait_s: float, batch_id: str) -> list[NumberedResult]:
        end = self._clock() + wait_s
        await self._journal.wait_beyond(cursor, wait_s)
        while True:
            newest = self._journal.newest_cursor
            found = await self._journal.results(cursor, limit, batch_id)
            if found or self._clock() >= end:
                return found
            await self._journal.wait_beyond(max(newest, cursor), end - self._clock())

    async def _known_rollout(self, rollout_id: str) -> RolloutProgress | None:
        if self._scheduler.life(rollout_id) is not None:
            return self._living(rollout_id)
        return await self._journal.rollout_progress(rollout_id)

    def _living(self, rollout_id: str) -> RolloutProgress:
        life = self._scheduler.life(rollout_id)
        assert life is not None
        batch_id = self._orders.batch_of(rollout_id)
        return RolloutProgress(rollout_id, life.status, life.attempt, life.worker, life.server, batch_id)

    # the run

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        answers = await self._publications.publish(update)
        self._outside.follow(update.policy)
        return answers

    async def drain_worker(self, worker_id: str, on: bool) -> WorkerStatus:
        self._dispatch.tell(WorkerDrains(worker_id, on))
        return _named(worker_id, "worker", {worker.worker_id: worker for worker in self.status().workers})

    async def add_server(self, server: OutsideServer) -> ServerStatus:
        if server.server_id in self._dispatch.agents.servers:
            message = f"LLM server {server.server_id!r} is one of the run's own: choose another id"
            raise conflict(message, "server_differs")
        await self._outside.add(server)
        return self._server_status(server.server_id)

    async def drain_server(self, server_id: str, on: bool) -> ServerStatus:
        self._dispatch.tell(ServerDrains(server_id, on))
        return self._server_status(server_id)

    async def remove_server(self, server_id: str) -> None:
        if server_id in self._dispatch.agents.servers:
            raise conflict(f"LLM server {server_id!r} is one of the run's own: it can only be drained", "own_server")
        self._outside.remove(server_id)

    async def pause(self, on: bool) -> RunStatus:
        noted = self._journal.set_paused(on)
        self._dispatch.tell(Pause(on))
        await noted
        return self.status()

    def status(self) -> RunStatus:
        now = self._clock()
        outside = self._outside.statuses(self._scheduler.servers.assigned, self._scheduler.servers.draining)
        return run_status(
            self._run_id,
            now - self._began,
            self._scheduler,
            self._dispatch.agents,
            outside,
            self._orders.shown(),
            self._rate.per_s(now),
        )

    def metrics(self) -> bytes:
        return self._metrics.render(self.status())

    def _server_status(self, server_id: str) -> ServerStatus:
        return _named(server_id, "server", {server.server_id: server for server in self.status().servers})

    # what happens

    def _ended(self, ended: Ended, now: float) -> Iterable[Event]:
        result = ended.result
        self._rate.count(now)
        self._metrics.ended(result)
        batch_id, moves, over = self._orders.ended(result, now)
        attempt_id = attempt_id_of(result.rollout_id, result.attempts)

        def on_disk(recorded: asyncio.Future[int]) -> None:
            if not recorded.cancelled() and recorded.exception() is None:
                self._dispatch.on_disk(result.worker, attempt_id)
                self._waiters.wake(("rollout", result.rollout_id))

        self._journal.record(result, ended.trajectory, batch_id).add_done_callback(on_disk)
        if over is not None:
            self._finish(over)
        self._metrics.accepted(len(moves.submit))
        return _events(moves)

    def _retried(self, retried: Retried) -> None:
        self._metrics.retried()
        self._journal.note_attempt(retried.rollout_id, retried.attempt)

    def _finish(self, over: Over) -> None:
        batch_id = over.result.progress.batch_id
        finished = self._journal.finish_batch(over.result, keeps_open=over.carries_on)
        finished.add_done_callback(lambda _: self._waiters.wake(("batch", batch_id)))

    def _make(self, moves: Moves) -> None:
        self._metrics.accepted(len(moves.submit))
        self._dispatch.tell(*_events(moves))

    def _send_weights(self, server_id: str, update: WeightUpdate) -> None:
        self._outbox.post(self._dispatch.agents.servers[server_id].peer, update)

    # tasks

    async def _receive(self) -> None:
        async for peer, message in self._door.messages():
            self.take(peer, message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._dispatch.tick()

    async def _watch(self) -> None:
        limit_s = self._config.lost_after_s
        period_s = min(self._config.heartbeat_s, limit_s / 4)
        before = self._clock()
        while True:
            await asyncio.sleep(period_s)
            late_s = self._clock() - before - period_s
            if late_s > limit_s / 2:
                log.warning("this process stood still for %.1f s: nobody's silence counts", late_s)
            before = self._clock()
            self._dispatch.watch(stood_still=late_s > limit_s / 2)

    async def _watch_journal(self) -> None:
        raise await self._journal.failed

    async def _write_status(self) -> None:
        while True:
            await self._save_status()
            await asyncio.sleep(_STATUS_S)

    async def _save_status(self) -> None:
        try:
            await asyncio.to_thread(write_json, self._status_file, self.status())
        except OSError as error:
            # Only people look at it; a disk that the run needs ends it through the journal.
            log.warning("the status of the run cannot be shown in %s: %s", self._status_file, error)

    async def _end(self, reason: str) -> None:
        """Let go of who waits, tell the agents."""
        self._waiters.close()
        self._publications.close()
        self._dispatch.shut_down(reason)
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._outbox.flush()
        except TimeoutError:
            log.warning("not all agents could be told that the run is over")
        await self._save_status()


def _events(moves: Moves) -> list[Event]:
    submit: list[Event] = [Submit(moves.submit)] if moves.submit else []
    cancel: list[Event] = [Cancel(moves.cancel)] if moves.cancel else []
    return submit + cancel


def _named(name: str, kind: str, found: dict[str, T]) -> T:
    if name not in found:
        raise not_found(kind, name)
    return found[name]
