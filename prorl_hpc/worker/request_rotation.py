"""Another LLM server for every request (rollout.balancing=round_robin_per_request, to compare with)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from prorl_hpc.messages.control import RequestServers, ServerRef
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.worker.llms import LLMSource, MovableLLM

Trouble = Callable[[str, str], None]


class Turns:
    """The servers of each policy in turn, of those that the coordinator told last."""

    def __init__(self) -> None:
        self._servers: dict[str, deque[ServerRef]] = {}

    def told(self, servers: Sequence[ServerRef]) -> None:
        self._servers = {}
        for server in servers:
            self._servers.setdefault(server.policy, deque()).append(server)

    def next(self, policy: str) -> ServerRef | None:
        """Whose turn it is; None if there is none."""
        servers = self._servers.get(policy)
        if not servers:
            return None
        servers.rotate(-1)
        return servers[-1]


class Request:
    """One request of a rollout, with an LLM of its own at ``server``, which moves with it."""

    def __init__(
        self, llms: LLMSource, server: ServerRef, rollout_id: str, priority: int, trouble: Trouble | None
    ) -> None:
        self.server = server
        self.rollout_id = rollout_id
        self.movable = trouble is not None
        self.stuck = False
        """Its server does not answer: it waits to be moved."""
        self._trouble = trouble
        self._llm: MovableLLM = llms.for_rollout(server, rollout_id, priority, self._tell if trouble else None)

    async def answer(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._llm.generate(token_ids, sampling)

    def move(self, server: ServerRef | None) -> None:
        self.server, self.stuck = server or self.server, False
        self._llm.move(server)

    def _tell(self, server_id: str, message: str) -> None:
        assert self._trouble is not None, "it is told only where somebody listens"
        self.stuck = True
        self._trouble(server_id, message)


class RequestRotation:
    """An LLMSource over ``llms``: the requests of all rollouts of this worker take the servers in turn."""

    def __init__(self, llms: LLMSource) -> None:
        self.llms = llms
        self.turns = Turns()
        self.under_way: set[Request] = set()

    def for_rollout(self, server: ServerRef, rollout_id: str, priority: int, trouble: Trouble | None) -> RotatingLLM:
        """``server`` is asked only while there is no other."""
        return RotatingLLM(self, server, rollout_id, priority, trouble)

    def told(self, order: RequestServers) -> None:
        """Other servers to choose from. What is under way to the lost one goes on at the next, or fails if it may not."""
        self.turns.told(order.servers)
        for request in [request for request in self.under_way if request.server.server_id == order.lost]:
            request.move(self.turns.next(request.server.policy) if request.movable else None)


class RotatingLLM:
    """A rollout's LLM, with a server of its own for each request."""

    def __init__(
        self, rotation: RequestRotation, server: ServerRef, rollout_id: str, priority: int, trouble: Trouble | None
    ) -> None:
        """``trouble`` as of LLMSource."""
        self._rotation = rotation
        self._server = server
        self._rollout_id = rollout_id
        self._priority = priority
        self._trouble = trouble

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        rotation = self._rotation
        server = rotation.turns.next(self._server.policy) or self._server
        request = Request(rotation.llms, server, self._rollout_id, self._priority, self._trouble)
        rotation.under_way.add(request)
        try:
            return await request.answer(token_ids, sampling)
        finally:
            rotation.under_way.discard(request)

    def move(self, server: ServerRef | None) -> None:
        """What is stuck goes on at ``server``; what is answered elsewhere stays there."""
        stuck = [r for r in self._rotation.under_way if r.stuck and r.rollout_id == self._rollout_id]
        for request in stuck:
            request.move(server)
