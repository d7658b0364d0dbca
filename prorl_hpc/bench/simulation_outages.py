"""Nodes and LLM servers that fail and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prorl_hpc.bench.simulation_clock import VirtualClock
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import Draws
from prorl_hpc.core.events import Event, ServerLost, ServerSeen, WorkerJoined, WorkerLost
from prorl_hpc.messages.control import ServerRef

_FAULT = "a simulated fault"


class Outages:
    """``happened`` tells the scheduler; ``fell`` is called when a node fails, of which the scheduler knows nothing
    before it has been silent for ``lost_after_s``, or is back with nothing."""

    def __init__(
        self,
        config: SimulationConfig,
        draws: Draws,
        clock: VirtualClock,
        happened: Callable[[Event, float], None],
        fell: Callable[[str, float], None],
    ) -> None:
        self._config, self._draws, self._clock = config, draws, clock
        self._happened, self._fell = happened, fell
        self.down: set[str] = set()
        """Nodes that are not there."""

    def expect_server(self, ref: ServerRef, number: int) -> None:
        if self._config.server_mtbf_s:
            up_times = self._draws.up_times(1, number, self._config.server_mtbf_s)
            self._clock.at(next(up_times), self._server_fails, (ref, up_times))

    def expect_node(self, worker_id: str, number: int) -> None:
        if self._config.node_mtbf_s:
            up_times = self._draws.up_times(0, number, self._config.node_mtbf_s)
            self._clock.at(next(up_times), self._node_fails, (worker_id, up_times))

    def _server_fails(self, what: tuple[ServerRef, Iterator[float]], now: float) -> None:
        self._clock.at(now + self._config.server_down_s, self._server_returns, what)
        self._happened(ServerLost(what[0].server_id, _FAULT), now)

    def _server_returns(self, what: tuple[ServerRef, Iterator[float]], now: float) -> None:
        self._clock.at(now + next(what[1]), self._server_fails, what)
        self._happened(ServerSeen(what[0], 0, True), now)

    def _node_fails(self, what: tuple[str, Iterator[float]], now: float) -> None:
        worker_id = what[0]
        self.down.add(worker_id)
        self._fell(worker_id, now)
        if self._config.lost_after_s < self._config.node_down_s:
            self._clock.at(now + self._config.lost_after_s, self._node_lost, worker_id)
        self._clock.at(now + self._config.node_down_s, self._node_returns, what)

    def _node_lost(self, worker_id: str, now: float) -> None:
        self._happened(WorkerLost(worker_id, _FAULT), now)

    def _node_returns(self, what: tuple[str, Iterator[float]], now: float) -> None:
        self.down.discard(what[0])
        self._clock.at(now + next(what[1]), self._node_fails, what)
        self._happened(WorkerJoined(what[0], self._config.pools), now)
