"""Between the agents' messages and the core: events in, commands out.

Everything runs on one event loop and every handling is without an await, so the core sees one event at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.events import (
    Ended,
    Event,
    Order,
    Retried,
    ServerLost,
    ServerSeen,
    Tick,
    WorkerDrains,
    WorkerJoined,
    WorkerLost,
)
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    Discarded,
    Draining,
    Goodbye,
    InferenceHello,
    ServerLoad,
    ServerTrouble,
    Shutdown,
    StageFinished,
    Welcome,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.inference import WeightUpdated
from prorl_hpc.messages.rollout import Stage
from prorl_hpc.rollout.agents import Agents, ServerAgent, WorkerAgent
from prorl_hpc.rollout.outbox import Outbox
from prorl_hpc.rollout.publications import Publications
from prorl_hpc.rollout.served_models import ServedModels

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class Dispatch:
    """``on_ended`` is told every end of a rollout and returns the events that it entails; ``on_retried`` every retry."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        outbox: Outbox,
        publications: Publications,
        *,
        on_ended: Callable[[Ended, float], Iterable[Event]],
        on_retried: Callable[[Retried], None],
        clock: Clock,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._outbox = outbox
        self._publications = publications
        self._on_ended = on_ended
        self._on_retried = on_retried
        self._clock = clock
        self.scheduler = Scheduler(
            retries=config.retries,
            balancing=config.balancing,
            move_runs=config.when_server_lost == "move",
            abort_cancelled=config.abort_cancelled,
        )
        self.agents = Agents()
        self.served = ServedModels()
        self._stopping: set[str] = set()
        """Workers that drain by themselves: one that is started anew under the name does not."""

    def tell(self, *events: Event) -> set[str]:
        """Give ``events`` to the scheduler and do what it wants, until nothing more is wanted. Returns the attempts
        that ended their rollout thereby."""
        now = self._clock()
        ended: set[str] = set()
        waiting = deque(events)
        while waiting:
            for command in self.scheduler.handle(waiting.popleft(), now):
                if isinstance(command, Order):
                    self._outbox.post(self.agents.workers[command.worker_id].peer, command.message)
                elif isinstance(command, Ended):
                    ended.add(command.attempt_id)
                    waiting.extend(self._on_ended(command, now))
                else:
                    self._on_retried(command)
        return ended

    def on_disk(self, worker_id: str, attempt_id: str) -> None:
        """The end of an attempt is on disk: its worker may forget it."""
        worker = self.agents.workers.get(worker_id)
        if worker is not None:
            self._outbox.acknowledge(worker.peer, attempt_id)

    def take(self, peer: bytes, message: AgentToCoordinator) -> None:
        """A message from an agent."""
        now = self._clock()
        self.agents.heard(peer, now)
        match message:
            case StageFinished():
                self._stage_finished(peer, message)
            case Discarded():
                self.tell(message)
            case WorkerLoad():
                self._welcome(peer, message.worker_id in self.agents.workers)
            case ServerLoad():
                self._server_load(peer, message, now)
            case ServerTrouble():
                log.warning(
                    "LLM server %s does not answer %s: %s", message.server_id, message.rollout_id, message.message
                )
                self.tell(message)
            case WeightUpdated():
                self._weights_loaded(message)
            case WorkerHello():
                self._worker_hello(peer, message, now)
            case InferenceHello():
                self._inference_hello(peer, message, now)
            case Draining():
                log.info("worker %s drains", message.worker_id)
                self._stopping.add(message.worker_id)
                self.tell(WorkerDrains(message.worker_id, True))
            case Goodbye():
                self.lost(message.agent_id, "it left", left=True)

    def tick(self) -> None:
        self.tell(Tick())

    def watch(self, *, stood_still: bool) -> None:
        """Agents that are silent for too long are lost, unless it was this process that did not listen."""
        now, limit_s = self._clock(), self._config.lost_after_s
        if stood_still:
            self.agents.forgive(now)
        for agent_id, silent_s in self.agents.silent(now, limit_s):
            self.lost(agent_id, f"nothing heard for {silent_s:.1f} s (rollout.lost_after_s={limit_s:g})")

    def lost(self, agent_id: str, reason: str, *, left: bool = False) -> None:
        """``left``: it was told to go, and said so."""
        agent = self.agents.forget(agent_id)
        if agent is None:
            return
        if left:
            log.info("%s has left, as it was told to", agent_id)
        else:
            log.warning("%s is lost: %s", agent_id, reason)
        if isinstance(agent, WorkerAgent):
            self.tell(WorkerLost(agent_id, reason, left))
        else:
            self.tell(ServerLost(agent_id, reason, left))
            self._publications.server_lost(agent.hello.server.policy, agent_id)

    def shut_down(self, reason: str) -> None:
        for agent in self.agents:
            self._outbox.post(agent.peer, Shutdown(reason))

    # workers

    def _stage_finished(self, peer: bytes, message: StageFinished) -> None:
        ended = self.tell(message)
        if _last(message) and message.rollout_id not in ended and message.worker_id in self.agents.workers:
            # Retried, or of an attempt that was given up: nothing of it has to get onto disk.
            self._outbox.acknowledge(peer, message.rollout_id)

    def _worker_hello(self, peer: bytes, hello: WorkerHello, now: float) -> None:
        if hello.worker_id not in self.agents.workers:
            holds = f", holding {len(hello.held)} rollouts" if hello.held else ""
            log.info("worker %s joined from %s (%s)%s", hello.worker_id, hello.node, hello.sandbox, holds)
        self.agents.worker_hello(hello, peer, now)
        self._welcome(peer, True)
        if hello.worker_id in self._stopping:
            self._stopping.remove(hello.worker_id)  # if it still does, it says so again behind this
            self.tell(WorkerDrains(hello.worker_id, False))
        ended = self.tell(WorkerJoined(hello.worker_id, hello.pools, tuple(hello.held)))
        for held in hello.held:
            if held.reports and _last(held.reports[-1]) and held.rollout_id not in ended:
                self._outbox.acknowledge(peer, held.rollout_id)

    # LLM servers

    def _inference_hello(self, peer: bytes, hello: InferenceHello, now: float) -> None:
        server_id = hello.server.server_id
        if refusal := self.served.refusal(hello):
            log.error("%s", refusal)
            self.lost(server_id, refusal)
            self._outbox.post(peer, Shutdown(refusal))
            return
        known = self.agents.servers.get(server_id)
        if known is not None and (known.hello.server, known.hello.instance) != (hello.server, hello.instance):
            self.lost(server_id, "it was started anew")
        joined = server_id not in self.agents.servers
        if joined:
            log.info("LLM server %s joined from %s (%s)", server_id, hello.server.node, hello.engine)
        agent = self.agents.server_hello(hello, peer, now)
        self._welcome(peer, True)
        self.server_seen(agent)
        self._publications.server_seen(hello.server.policy, server_id, hello.weight_version, joined=joined)

    def _server_load(self, peer: bytes, load: ServerLoad, now: float) -> None:
        agent = self.agents.servers.get(load.server_id)
        self._welcome(peer, agent is not None)
        if agent is None:
            return
        if load.healthy != agent.healthy:
            log.warning("LLM server %s is %s: %s", load.server_id, "well" if load.healthy else "not well", load.detail)
        agent.reported(load, now)
        self.server_seen(agent)
        self._publications.server_seen(agent.hello.server.policy, load.server_id, load.weight_version, joined=False)

    def _weights_loaded(self, answer: WeightUpdated) -> None:
        if answer.error:
            log.error("%s did not take weights of version %d: %s", answer.server_id, answer.version, answer.error)
        agent = self.agents.servers.get(answer.server_id)
        if agent is None:
            return
        if not answer.error:
            agent.weight_version = answer.version
            self.server_seen(agent)
        self._publications.answered(agent.hello.server.policy, answer)

    def server_seen(self, agent: ServerAgent) -> None:
        self.tell(ServerSeen(agent.hello.server, agent.weight_version, agent.healthy))

    def _welcome(self, peer: bytes, known: bool) -> None:
        self._outbox.post(peer, Welcome(self._run_id, self._config.heartbeat_s, known))


def _last(report: StageFinished) -> bool:
    """Whether nothing follows of this attempt."""
    return report.failure is not None or report.stage is Stage.EVAL
