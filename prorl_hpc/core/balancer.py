"""Which LLM server a rollout talks to: the one with the fewest assignments in flight, for its whole RUN.

Assignments are returned when RUN ends, however it ends, so a server that joins late is offered rollouts only
until it carries as many as the others. Only healthy servers with the newest weights get any: the newest
version is the highest that some server of the policy has had. A publication that fails everywhere thus
stops nothing, and a server that was started anew, with the weights on disk, waits for its update.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from prorl_hpc.core.least_loaded import LeastLoaded
from prorl_hpc.messages.control import ServerRef


@dataclass
class _Server:
    ref: ServerRef
    weight_version: int
    healthy: bool
    assigned: set[str] = field(default_factory=set)


class ServerBalancer:
    """Servers of any number of policies. Names of assignments are the caller's."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._eligible: dict[str, LeastLoaded[float]] = {}
        self._newest: dict[str, int] = {}
        self._server_of: dict[str, str] = {}

    def seen(self, ref: ServerRef, weight_version: int, healthy: bool) -> None:
        """A server joined or reported; assignments it had stay with it."""
        server = self._servers.get(ref.server_id)
        if server is None:
            server = self._servers[ref.server_id] = _Server(ref, weight_version, healthy)
        elif server.ref.policy != ref.policy:
            self._heap(server.ref.policy).discard(ref.server_id)
        server.ref, server.weight_version, server.healthy = ref, weight_version, healthy
        if weight_version > self._newest.get(ref.policy, 0):
            self._newest[ref.policy] = weight_version
            for other in self._servers.values():
                self._rank(other)
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
        None if no server of ``policy`` is healthy and up to date."""
        server_id = self._server_of.get(name)
        if server_id is None:
            heap = self._heap(policy)
            server_id = heap.least(avoid) or heap.least()
            if server_id is None:
                return None
            self._server_of[name] = server_id
            self._servers[server_id].assigned.add(name)
            self._rank(self._servers[server_id])
        return self._servers[server_id].ref

    def release(self, name: str) -> None:
        """Return an assignment; one that is not there is passed over."""
        server_id = self._server_of.pop(name, None)
        if server_id is not None:
            server = self._servers[server_id]
            server.assigned.remove(name)
            self._rank(server)

    def assigned(self, server_id: str) -> int:
        """Assignments in flight on a server; 0 if it is unknown."""
        server = self._servers.get(server_id)
        return len(server.assigned) if server else 0

    def _heap(self, policy: str) -> LeastLoaded[float]:
        return self._eligible.setdefault(policy, LeastLoaded())

    def _rank(self, server: _Server) -> None:
        heap = self._heap(server.ref.policy)
        if server.healthy and server.weight_version >= self._newest.get(server.ref.policy, 0):
            heap.set(server.ref.server_id, len(server.assigned))
        else:
            heap.discard(server.ref.server_id)
