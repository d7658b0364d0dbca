"""The rollout service behind its HTTP face: the run around its orders.

Implements service.protocol.RolloutService, with OrderDesk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.events import Drain, Hold, Pause, Recover, ServerDrains, WorkerDrains
from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.control import AgentToCoordinator, ServerTrouble
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.status import RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.rollout.dispatch import Clock
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.rollout.metrics import CoordinatorMetrics
from prorl_hpc.rollout.order_desk import OrderDesk, events_of
from prorl_hpc.rollout.outbox import Outbox
from prorl_hpc.rollout.outside_servers import OutsideServers
from prorl_hpc.rollout.publications import Publications
from prorl_hpc.rollout.run_status import run_status
from prorl_hpc.rollout.served_models import ServedModels
from prorl_hpc.service.errors import conflict, not_found
from prorl_hpc.transport.channels import RouterDoor

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK_S = 0.25
_STATUS_S = 1.0
_GOODBYE_S = 1.0
_DRAIN_LOOK_S = 0.1
_GRACE_BEATS = 3
"""Heartbeats after a restart that workers have to say what they hold."""


class Coordinator(OrderDesk):
    """``run`` until stopped. ``tasks``: the tasks that the workers serve. ``choice``: the policies of the run, ``served``: their
    models."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        door: RouterDoor[AgentToCoordinator],
        journal: Journal,
        keepsakes: Keepsakes,
        *,
        status_file: Path,
        drained_marker: Path,
        tasks: Collection[str],
        choice: PolicyChoice | None = None,
        served: ServedModels | None = None,
        first_server_s: float = 600.0,
        outside_turn_s: float = 120.0,
        clock: Clock = time.monotonic,
    ) -> None:
        choice = choice or PolicyChoice()
        self.tasks = tasks
        self.policies = choice.names
        self._run_id = run_id
        self._config = config
        self._door = door
        self._status_file = status_file
        self._drained_marker = drained_marker
        self._awaited = frozenset(keepsakes.awaited)
        self._began = clock()
        self._outbox = Outbox(door)
        self._publications = Publications(self._send_weights, keepsakes, first_server_s=first_server_s)
        metrics = CoordinatorMetrics(refused=lambda: door.refused)
        super().__init__(run_id, config, journal, self._outbox, self._publications, metrics, clock, choice)
        for policy, update in keepsakes.weights.items():
            self._scheduler.servers.require(policy, update.version)
        for policy in self._awaited:  # not the weights that an engine starts with
            self._scheduler.servers.require(policy, 1)
        self._dispatch.served = served = served or ServedModels()
        newest = self._scheduler.servers.newest
        self._outside = OutsideServers(keepsakes, self._dispatch.tell, newest, served.path, outside_turn_s)

    async def run(
        self, stop: asyncio.Event, reason: str = "the run is over", *, drain: asyncio.Event | None = None
    ) -> None:
        """Serve until ``stop``, then tell all agents to shut down. From ``drain`` on no rollout is started; when none is
        under way any more, ``drained_marker`` is written. Raises what breaks it."""
        async with asyncio.TaskGroup() as group:
            works = (self._receive(), self._outbox.run(), self._tick(), self._watch(), self._write_status())
            tasks = [group.create_task(work) for work in (*works, self._outside.watch(), self._watch_journal())]
            tasks += [group.create_task(self._drain(drain))] if drain is not None else []
            await stop.wait()
            await self._end(reason)
            for task in tasks:
                task.cancel()

    async def resume(self) -> None:
        """Go on with what an earlier process had accepted, in this attempt of the run or in another. Once, before
        ``run``."""
        found, paused = await self._journal.recover()
        self._scheduler.counts.update(await self._journal.ended_counts())
        self._figures = await self._journal.ended_figures(self.policies)
        cut_off = self._journal.cut_off
        resumed = self._orders.resume(found, self._clock(), cut_off=cut_off, sleeping=self._awaited)
        if cut_off:
            await self._journal.begin_attempt(resumed.under_way, resumed.asleep)
        # What another attempt had under way nobody holds any more.
        grace_s = 0.0 if cut_off else _GRACE_BEATS * self._config.heartbeat_s
        self._dispatch.tell(Pause(paused), Recover(resumed.under_way, grace_s), *events_of(resumed.moves))
        for over in resumed.over:
            self._finish(over)
        self._outside.restore()
        if found:
            log.info(
                "going on with %d orders and %d unfinished rollouts of an earlier %s%s",
                len(found),
                len(resumed.under_way),
                "attempt" if cut_off else "process",
                "" if cut_off else f"; workers have {grace_s:g} s to say what they hold",
            )
        if resumed.asleep:
            log.info("batches %s go on when they are asked for", ", ".join(resumed.asleep))
        if self._awaited:
            log.info("policies %s wait for the trainer to publish their weights", ", ".join(sorted(self._awaited)))

    def take(self, peer: bytes, message: AgentToCoordinator) -> None:
        """A message from an agent."""
        self._dispatch.take(peer, message)
        if isinstance(message, ServerTrouble):
            self._outside.doubt(message.server_id)

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

    async def pause_for(self, holder: str, for_s: float) -> RunStatus:
        self._dispatch.tell(Hold(holder, for_s))
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
            self._figures,
            self._scheduler.holds(now),
        )

    def metrics(self) -> bytes:
        return self._metrics.render(self.status())

    def _server_status(self, server_id: str) -> ServerStatus:
        return _named(server_id, "server", {server.server_id: server for server in self.status().servers})

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

    async def _drain(self, wanted: asyncio.Event) -> None:
        await wanted.wait()
        self._dispatch.tell(Drain())
        log.info("draining: no rollout is started any more, %d are under way", self._scheduler.under_way)
        while self._scheduler.under_way:  # noqa: ASYNC110  (changes on every report)
            await asyncio.sleep(_DRAIN_LOOK_S)
        await self._journal.flush()
        await asyncio.to_thread(self._drained_marker.touch)
        log.info("drained: no rollout is under way")

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
        """Let go of who waits, tell the agents; what they cut off thereby is no fault of the rollouts."""
        self._dispatch.tell(Drain())
        self._waiters.close()
        self._publications.close()
        self._dispatch.shut_down(reason)
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._outbox.flush()
        except TimeoutError:
            log.warning("not all agents could be told that the run is over")
        await self._save_status()


def _named(name: str, kind: str, found: dict[str, T]) -> T:
    if name not in found:
        raise not_found(kind, name)
    return found[name]
