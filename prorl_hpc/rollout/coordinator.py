"""The asyncio shell around core: messages in, events to the scheduler, its commands out.

Everything runs on one event loop and every handling is without an await, so the core sees one event at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.events import (
    Cancel,
    Event,
    Order,
    ServerLost,
    ServerSeen,
    Submit,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.groups import Moves
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    Discarded,
    Goodbye,
    InferenceHello,
    ServerLoad,
    Shutdown,
    StageFinished,
    Welcome,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.messages.status import RunStatus
from prorl_hpc.rollout.agents import Agents, ServerAgent, WorkerAgent
from prorl_hpc.rollout.orders import Orders
from prorl_hpc.rollout.run_status import Rate, run_status
from prorl_hpc.rollout.weights import WeightFanOut
from prorl_hpc.service.errors import conflict
from prorl_hpc.transport.channels import RouterDoor

log = logging.getLogger(__name__)

_TICK_S = 0.25
_STATUS_S = 1.0
_GOODBYE_S = 1.0
MAX_LIVE_ROLLOUTS = 200_000


class BatchStore(Protocol):
    """Where finished batches go (observe.rollout_store.RolloutStore)."""

    def write_batch(self, batch_id: str, result: BatchResult) -> Path: ...


class Coordinator:
    """Implements service.protocol.RolloutService. ``run`` until stopped."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        door: RouterDoor[AgentToCoordinator],
        *,
        store: BatchStore | None,
        status_file: Path,
        first_server_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``store`` None: finished batches are not written down."""
        self._run_id = run_id
        self._config = config
        self._door = door
        self._store = store
        self._status_file = status_file
        self._clock = clock
        self._began = clock()
        self._scheduler = Scheduler(retries=config.retries)
        self._agents = Agents()
        self._orders = Orders(self._batch_over)
        self._weights = WeightFanOut(self._send_weights, first_server_s=first_server_s)
        self._rate = Rate()
        self._outbox: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self._writes: asyncio.Queue[BatchResult] = asyncio.Queue()

    async def run(self, stop: asyncio.Event, reason: str = "the run is over") -> None:
        """Serve until ``stop``, then tell all agents to shut down. Raises what breaks it."""
        async with asyncio.TaskGroup() as group:
            works = (self._receive(), self._send_outbox(), self._tick(), self._watch(), self._write_status())
            tasks = [group.create_task(work) for work in (*works, self._write_batches())]
            await stop.wait()
            await self._end(reason)
            for task in tasks:
                task.cancel()

    # RolloutService

    def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        if spec.batch_id not in self._orders.batches:
            self._check_room(spec.group_size * (spec.max_parallel_groups or spec.groups_wanted))
        self._make(self._orders.begin_batch(spec, self._clock()))
        return self._orders.batch_progress(spec.batch_id)

    def batch_progress(self, batch_id: str) -> BatchProgress:
        return self._orders.batch_progress(batch_id)

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        return await self._orders.batches.wait(batch_id, wait_s) or self._orders.batch_progress(batch_id)

    def cancel_batch(self, batch_id: str) -> BatchProgress:
        self._make(self._orders.cancel_batch(batch_id, self._clock()))
        return self._orders.batch_progress(batch_id)

    def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        self._check_room(sum(spec.rollout_id not in self._orders.rollouts for spec in specs))
        self._make(self._orders.begin_rollouts(specs))
        return [self.rollout_progress(spec.rollout_id) for spec in specs]

    def rollout_progress(self, rollout_id: str) -> RolloutProgress:
        if self._orders.rollouts.finished(rollout_id):
            return self._orders.ended_rollout(rollout_id)
        life = self._scheduler.life(rollout_id)
        assert life is not None, "an open rollout lives"
        return RolloutProgress(rollout_id, life.status, life.attempt, life.worker, life.server)

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress:
        return await self._orders.rollouts.wait(rollout_id, wait_s) or self.rollout_progress(rollout_id)

    def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        if self._orders.rollouts.finished(rollout_id):
            progress = self._orders.ended_rollout(rollout_id)
            if progress.status != "cancelled":
                message = f"rollout {rollout_id!r} is over ({progress.status}): there is nothing to cancel"
                raise conflict(message, "already_finished", status=progress.status)
            return progress
        self._handle(Cancel((rollout_id,)))
        return self.rollout_progress(rollout_id)

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        return await self._weights.publish(update)

    def status(self) -> RunStatus:
        now = self._clock()
        uptime_s, rate = now - self._began, self._rate.per_s(now)
        return run_status(self._run_id, uptime_s, self._scheduler, self._agents, self._orders, rate)

    # core

    def _handle(self, event: Event) -> None:
        """Give ``event`` to the scheduler and do what it and the batches want, until they want nothing more."""
        now = self._clock()
        events = deque([event])
        while events:
            for command in self._scheduler.handle(events.popleft(), now):
                if isinstance(command, Order):
                    self._post(self._agents.workers[command.worker_id].peer, command.message)
                else:
                    self._rate.count(now)
                    events.extend(_events(self._orders.ended(command.result, now)))

    def _make(self, moves: Moves) -> None:
        for event in _events(moves):
            self._handle(event)

    def _check_room(self, more: int) -> None:
        live = self._scheduler.live
        if live + more > MAX_LIVE_ROLLOUTS:
            message = (
                f"{live} rollouts are under way and {more} more would pass the limit of {MAX_LIVE_ROLLOUTS}: try later"
            )
            raise ServiceError(message, code="queue_full", status=429)

    # messages

    def _take(self, peer: bytes, message: AgentToCoordinator) -> None:
        now = self._clock()
        self._agents.heard(peer, now)
        match message:
            case WorkerHello():
                self._worker_hello(peer, message, now)
            case InferenceHello():
                self._inference_hello(peer, message, now)
            case ServerLoad():
                self._server_load(message, now)
            case Goodbye():
                self._lost(message.agent_id, "it left")
            case StageFinished() | Discarded():
                self._handle(message)
            case WeightUpdated():
                self._weights_loaded(message)
            case WorkerLoad():
                pass  # being heard is all that it is for

    def _worker_hello(self, peer: bytes, hello: WorkerHello, now: float) -> None:
        if hello.worker_id not in self._agents.workers:
            log.info("worker %s joined from %s (%s)", hello.worker_id, hello.node, hello.sandbox)
        self._agents.worker_hello(hello, peer, now)
        self._post(peer, Welcome(self._run_id, self._config.heartbeat_s))
        self._handle(WorkerJoined(hello.worker_id, hello.pools, frozenset(hello.held)))

    def _inference_hello(self, peer: bytes, hello: InferenceHello, now: float) -> None:
        server_id = hello.server.server_id
        known = self._agents.servers.get(server_id)
        if known is not None and known.hello.server != hello.server:
            self._lost(server_id, "it was started anew")
        joined = server_id not in self._agents.servers
        if joined:
            log.info("LLM server %s joined from %s (%s)", server_id, hello.server.node, hello.engine)
        agent = self._agents.server_hello(hello, peer, now)
        self._post(peer, Welcome(self._run_id, self._config.heartbeat_s))
        self._server_seen(agent)
        self._weights.server_seen(server_id, hello.weight_version, joined=joined)

    def _server_load(self, load: ServerLoad, now: float) -> None:
        agent = self._agents.servers.get(load.server_id)
        if agent is None:
            return  # lost before; it says Hello again when it notices our silence
        if load.healthy != agent.healthy:
            log.warning("LLM server %s is %s: %s", load.server_id, "well" if load.healthy else "not well", load.detail)
        agent.reported(load, now)
        self._server_seen(agent)
        self._weights.server_seen(load.server_id, load.weight_version, joined=False)

    def _weights_loaded(self, answer: WeightUpdated) -> None:
        if answer.error:
            log.error("%s did not take weights of version %d: %s", answer.server_id, answer.version, answer.error)
        agent = self._agents.servers.get(answer.server_id)
        if agent is not None and not answer.error:
            agent.weight_version = answer.version
            self._server_seen(agent)
        self._weights.answered(answer)

    def _server_seen(self, agent: ServerAgent) -> None:
        self._handle(ServerSeen(agent.hello.server, agent.weight_version, agent.healthy))

    def _lost(self, agent_id: str, reason: str) -> None:
        agent = self._agents.forget(agent_id)
        if agent is None:
            return
        log.warning("%s is lost: %s", agent_id, reason)
        if isinstance(agent, WorkerAgent):
            self._handle(WorkerLost(agent_id, reason))
        else:
            self._handle(ServerLost(agent_id, reason))
            self._weights.server_lost(agent_id)

    def _send_weights(self, server_id: str, update: WeightUpdate) -> None:
        self._post(self._agents.servers[server_id].peer, update)

    def _post(self, peer: bytes, message: Any) -> None:
        self._outbox.put_nowait((peer, message))

    def _batch_over(self, result: BatchResult) -> None:
        if self._store is not None:
            self._writes.put_nowait(result)

    # tasks

    async def _receive(self) -> None:
        async for peer, message in self._door.messages():
            self._take(peer, message)

    async def _send_outbox(self) -> None:
        while True:
            peer, message = await self._outbox.get()
            await self._door.send(peer, message)
            self._outbox.task_done()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._handle(Tick())

    async def _watch(self) -> None:
        """Agents that are silent for too long are lost, unless it was this process that did not listen."""
        limit_s = self._config.lost_after_s
        period_s = min(self._config.heartbeat_s, limit_s / 4)
        before = self._clock()
        while True:
            await asyncio.sleep(period_s)
            now = self._clock()
            if now - before > period_s + limit_s / 2:
                log.warning("this process stood still for %.1f s: nobody's silence counts", now - before - period_s)
                self._agents.forgive(now)
            before = now
            for agent_id, silent_s in self._agents.silent(now, limit_s):
                self._lost(agent_id, f"nothing heard for {silent_s:.1f} s (rollout.lost_after_s={limit_s:g})")

    async def _write_status(self) -> None:
        while True:
            await asyncio.to_thread(write_json, self._status_file, self.status())
            await asyncio.sleep(_STATUS_S)

    async def _write_batches(self) -> None:
        while True:
            result = await self._writes.get()
            batch_id = result.progress.batch_id
            assert self._store is not None
            try:
                await asyncio.to_thread(self._store.write_batch, batch_id, result)
            except OSError as error:
                raise RunError(
                    f"the trajectories of batch {batch_id} cannot be written: {error}. Free space in the run "
                    "directory, or set rollout.keep_trajectories=false"
                ) from error
            self._writes.task_done()

    async def _end(self, reason: str) -> None:
        """Let go of who waits, finish writing, tell the agents."""
        self._orders.close()
        self._weights.close()
        for agent in self._agents:
            self._post(agent.peer, Shutdown(reason))
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._outbox.join()
                await self._writes.join()
        except TimeoutError:
            log.warning("%d batches were not written before the end", self._writes.qsize())
        await asyncio.to_thread(write_json, self._status_file, self.status())


def _events(moves: Moves) -> list[Event]:
    submit: list[Event] = [Submit(moves.submit)] if moves.submit else []
    cancel: list[Event] = [Cancel(moves.cancel)] if moves.cancel else []
    return submit + cancel
