"""The coordinator's state as people see it."""

from __future__ import annotations

import time
from collections import deque

from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.core.workplace import Slot, Workplace
from prorl_hpc.messages.batch import BatchProgress
from prorl_hpc.messages.rollout import Status
from prorl_hpc.messages.status import RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.rollout.agents import Agents, ServerAgent
from prorl_hpc.rollout.policy_figures import PolicyFigures


class Rate:
    """Events per second over the last ``window_s``."""

    def __init__(self, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()

    def count(self, now: float) -> None:
        self._times.append(now)
        self._forget(now)

    def per_s(self, now: float) -> float:
        self._forget(now)
        return len(self._times) / self._window_s

    def _forget(self, now: float) -> None:
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()


def run_status(
    run_id: str,
    uptime_s: float,
    scheduler: Scheduler,
    agents: Agents,
    outside: list[ServerStatus],
    batches: list[BatchProgress],
    rollouts_per_s: float,
    figures: PolicyFigures,
    holds: dict[str, float],
) -> RunStatus:
    """``outside``: servers that are not of this run. ``holds`` as in RunStatus."""
    balancer = scheduler.servers
    return RunStatus(
        run_id=run_id,
        time=time.time(),
        uptime_s=uptime_s,
        rollouts={status.value: scheduler.counts[status] for status in Status},
        workers=[
            WorkerStatus(
                worker_id,
                agent.hello.node,
                agent.hello.sandbox,
                _pools(scheduler.workers[worker_id]),
                scheduler.workers[worker_id].draining,
            )
            for worker_id, agent in sorted(agents.workers.items())
        ],
        servers=[
            *(
                _server(agent, balancer.assigned(server_id), balancer.draining(server_id))
                for server_id, agent in sorted(agents.servers.items())
            ),
            *outside,
        ],
        batches=batches,
        rollouts_per_s=rollouts_per_s,
        paused=scheduler.paused,
        draining=scheduler.draining,
        holds=holds,
        policies=figures.statuses(balancer.policies),
    )


def _pools(workplace: Workplace) -> dict[str, list[int]]:
    pools = workplace.pools
    sizes = {Slot.INIT: pools.init, Slot.READY: pools.ready, Slot.RUN: pools.run, Slot.EVAL: pools.eval}
    return {slot.name.lower(): [workplace.used(slot), size] for slot, size in sizes.items()}


def _server(agent: ServerAgent, assigned: int, draining: bool) -> ServerStatus:
    hello, load = agent.hello, agent.load
    return ServerStatus(
        server_id=hello.server.server_id,
        node=hello.server.node,
        engine=hello.engine,
        model=hello.model,
        healthy=agent.healthy,
        weight_version=agent.weight_version,
        assigned=assigned,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        generated_tokens=load.generated_tokens if load else 0,
        tokens_per_s=agent.tokens_per_s,
        detail=load.detail if load else "",
        policy=hello.server.policy,
        draining=draining,
    )
