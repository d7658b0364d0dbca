"""Which LLM server a rollout talks to: the one with the fewest assignments in flight, for its whole RUN.

Assignments are returned when RUN ends, however it ends, so a server that joins late is offered rollouts only
until it carries as many as the others. Only healthy servers that do not drain and have the newest weights get any:
the newest version is the highest that some server of the policy has had. A publication that fails everywhere thus
stops nothing, and a server that was started anew, with the weights on disk, waits for its update.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.messages.control import ServerRef

PER_REQUEST = "round_robin_per_request"
BALANCING = ("least_in_flight", "round_robin", PER_REQUEST)


@dataclass
class _Server:
    ref: ServerRef
    weight_version: int
    healthy: bool
    draining: bool = False
    assigned: set[str] = field(default_factory=set)


class ServerBalancer:
    """Servers of any number of policies. Names of assignments are the caller's."""

    def __init__(self, balancing: str = "least_in_flight") -> None:
        """``round_robin``: whoever was chosen longest ago is next, whatever it carries (to compare with); so too with
        ``round_robin_per_request``, where assignments are in name only and workers choose for each turn."""
        if balancing not in BALANCING:
            raise ValueError(f"balancing is {balancing!r}: expected one of {', '.join(BALANCING)}")
        self._turns = itertools.count() if balancing != "least_in_flight" else None
        self._servers: dict[str, _Server] = {}
        self._eligible: dict[str, LeastLoaded[float]] = {}
        self._newest: dict[str, int] = {}
        self._server_of: dict[str, str] = {}

    def seen(self, ref: ServerRef, weight_version: int, healthy: bool) -> bool:
        """A server joined or reported; assignments it had stay with it. True if the choice has changed thereby."""
        before = self._servers.get(ref.server_id)
        if before is not None and (before.ref, before.weight_version, before.healthy) == (ref, weight_version, healthy):
            return False
        server = before or _Server(ref, weight_version, healthy)
        self._servers[ref.server_id] = server
        if server.ref.policy != ref.policy:
            self._heap(server.ref.policy).discard(ref.server_id)
        server.ref, server.weight_version, server.healthy = ref, weight_version, healthy
        self.require(ref.policy, weight_version)
        self._rank(server)
        return True

    def require(self, policy: str, weight_version: int) -> None:
        """Servers of ``policy`` with older weights than these get no assignments, whoever has newer ones."""
        if weight_version > self._newest.get(policy, 0):
            self._newest[policy] = weight_version
            for server in self._servers.values():
                self._rank(server)

    def newest(self, policy: str) -> int:
        """The newest weight version of ``policy``; 0 if there was none yet."""
        return self._newest.get(policy, 0)

    def drain(self, server_id: str, on: bool) -> None:
        """A draining server gets no more; what it has stays. One that is unknown is passed over."""
        server = self._servers.get(server_id)
        if server is not None:
            server.draining = on
            self._rank(server)

    def lost(self, server_id: str) -> list[str]:
        """Forget a server; returns the assignments it had, which are returned thereby."""
        server = self._servers.pop(server_id, None)
        if server is None:
            return []
        self._heap(server.ref.policy).discard(server_id)
        for name in server.assigned:
            del self._server_of[name]
        return sorted(server.assigned)

    def assign(self, name: str, policy: str, avoid: Collection[str] = ()) -> ServerRef | None:
        """Assign ``name`` to the least loaded server, or to the one it has already; those in ``avoid`` come last.
        None if no server of ``policy`` can take it."""
        server_id = self._server_of.get(name)
        if server_id is None:
            heap = self._heap(policy)
            server_id = heap.least(avoid) or (heap.least() if avoid else None)
            if server_id is None:
                return None
            self._give(name, server_id)
        return self._servers[server_id].ref

    def move(self, name: str, policy: str, avoid: Collection[str]) -> ServerRef | None:
        """Assign ``name`` to a server that is not in ``avoid``, away from the one it has; None, and nothing is
        changed, if there is none."""
        server_id = self._heap(policy).least(avoid)
        if server_id is None:
            return None
        self.release(name)
        self._give(name, server_id)
        return self._servers[server_id].ref

    def adopt(self, name: str, ref: ServerRef) -> None:
        """``name`` is at work on a server already, which may not have been seen here yet."""
        if ref.server_id not in self._servers:
            self._servers[ref.server_id] = _Server(ref, 0, healthy=False)
        self._give(name, ref.server_id)

    def release(self, name: str) -> None:
        """Return an assignment; one that is not there is passed over."""
        server_id = self._server_of.pop(name, None)
        if server_id is not None:
            server = self._servers[server_id]
            server.assigned.remove(name)
            if self._turns is None:
                self._rank(server)

    def assigned(self, server_id: str) -> int:
        """Assignments in flight on a server; 0 if it is unknown."""
        server = self._servers.get(server_id)
        return len(server.assigned) if server else 0

    def draining(self, server_id: str) -> bool:
        server = self._servers.get(server_id)
        return server is not None and server.draining

    def serves(self, policy: str) -> bool:
        """Whether a rollout of ``policy`` would get a server now."""
        return bool(self._eligible.get(policy))

    @property
    def eligible(self) -> list[ServerRef]:
        """Servers that get assignments now, of all policies, by name."""
        return [self._servers[name].ref for name in sorted(name for heap in self._eligible.values() for name in heap)]

    @property
    def serves_any(self) -> bool:
        """Whether a rollout of any policy would get a server now."""
        return any(len(heap) for heap in self._eligible.values())

    @property
    def policies(self) -> dict[str, tuple[int, int, int]]:
        """Policy → newest weight version, servers, those that get assignments."""
        names = sorted({server.ref.policy for server in self._servers.values()})
        servers = [server.ref.policy for server in self._servers.values()]
        return {name: (self._newest.get(name, 0), servers.count(name), len(self._heap(name))) for name in names}

    def _give(self, name: str, server_id: str) -> None:
        server = self._servers[server_id]
        self._server_of[name] = server_id
        server.assigned.add(name)
        self._rank(server)

    def _heap(self, policy: str) -> LeastLoaded[float]:
        heap = self._eligible.get(policy)
        if heap is None:
            heap = self._eligible[policy] = LeastLoaded()
        return heap

    def _rank(self, server: _Server) -> None:
        heap = self._heap(server.ref.policy)
        newest = server.weight_version >= self._newest.get(server.ref.policy, 0)
        if server.healthy and not server.draining and newest:
            heap.set(server.ref.server_id, len(server.assigned) if self._turns is None else next(self._turns))
        else:
            heap.discard(server.ref.server_id)
