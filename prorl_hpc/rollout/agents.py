"""The nodes' agents as the coordinator knows them: their lines, when they were heard, what they said last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prorl_hpc.messages.control import InferenceHello, ServerLoad, WorkerHello

_RATE_WINDOW_S = 5.0


@dataclass
class WorkerAgent:
    hello: WorkerHello
    peer: bytes
    heard: float


@dataclass
class ServerAgent:
    """``weight_version`` and ``load`` are what it said last; ``tokens_per_s`` is over the last seconds."""

    hello: InferenceHello
    peer: bytes
    heard: float
    weight_version: int
    load: ServerLoad | None = None
    tokens_per_s: float = 0.0
    _window: tuple[float, int] = field(default=(0.0, 0))

    @property
    def healthy(self) -> bool:
        return self.load is None or self.load.healthy

    def reported(self, load: ServerLoad, now: float) -> None:
        self.load, self.weight_version = load, load.weight_version
        began, tokens = self._window
        if not began or load.generated_tokens < tokens:  # the first report, or an engine that was started anew
            self._window, self.tokens_per_s = (now, load.generated_tokens), 0.0
        elif now - began >= _RATE_WINDOW_S:
            self.tokens_per_s = (load.generated_tokens - tokens) / (now - began)
            self._window = (now, load.generated_tokens)


class Agents:
    """Joined and not lost."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerAgent] = {}
        self.servers: dict[str, ServerAgent] = {}
        self._by_peer: dict[bytes, WorkerAgent | ServerAgent] = {}

    def __iter__(self) -> Iterator[WorkerAgent | ServerAgent]:
        return iter((*self.workers.values(), *self.servers.values()))

    def worker_hello(self, hello: WorkerHello, peer: bytes, now: float) -> None:
        self.workers[hello.worker_id] = self._by_peer[peer] = WorkerAgent(hello, peer, now)

    def server_hello(self, hello: InferenceHello, peer: bytes, now: float) -> ServerAgent:
        """One that is known keeps what it reported."""
        server_id = hello.server.server_id
        agent = self.servers.get(server_id)
        if agent is None:
            agent = self.servers[server_id] = ServerAgent(hello, peer, now, hello.weight_version)
        agent.hello, agent.peer, agent.heard, agent.weight_version = hello, peer, now, hello.weight_version
        self._by_peer[peer] = agent
        return agent

    def heard(self, peer: bytes, now: float) -> None:
        agent = self._by_peer.get(peer)
        if agent is not None:
            agent.heard = now

    def forget(self, agent_id: str) -> WorkerAgent | ServerAgent | None:
        agent = self.workers.pop(agent_id, None) or self.servers.pop(agent_id, None)
        if agent is not None:
            self._by_peer.pop(agent.peer, None)
        return agent

    def silent(self, now: float, limit_s: float) -> list[tuple[str, float]]:
        """(id, seconds) of agents unheard for longer than ``limit_s``."""
        named: list[tuple[str, WorkerAgent | ServerAgent]] = [*self.workers.items(), *self.servers.items()]
        return [(name, now - agent.heard) for name, agent in named if now - agent.heard > limit_s]

    def forgive(self, now: float) -> None:
        """This process did not listen for a while: nobody's silence counts."""
        for worker in self.workers.values():
            worker.heard = now
        for server in self.servers.values():
            server.heard = now
