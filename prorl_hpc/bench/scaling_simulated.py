"""What the simulation of a series came to: how well it foretells what was measured, and what it says of more nodes."""

from __future__ import annotations

import msgspec

from prorl_hpc.bench.scaling_records import Times

ALLOWED_ERROR = 0.10
"""Of a foretold rate, relative to the measured one: beyond it the continuation is not called valid."""


class Check(msgspec.Struct, frozen=True):
    """One measured point. ``foretold_per_s``: from the stage times of the other points alone (of its own where there is
    no other); ``replayed_per_s``: from its own, which tells a wrong model from stage times that differ by point."""

    name: str
    nodes: int
    measured_per_s: float
    foretold_per_s: float
    replayed_per_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured; positive: foretold too fast."""
        return self.foretold_per_s / self.measured_per_s - 1

    @property
    def replay_error(self) -> float:
        return self.replayed_per_s / self.measured_per_s - 1


class SimulatedPoint(msgspec.Struct, frozen=True):
    """``efficiency`` is against the simulation of the smallest measured size with as many rollouts a node, so that like
    stands against like. ``waits`` and ``utilisation`` are over the whole simulation.
    ``coordinator_busy`` is a share of one CPU; above 1 the coordinator cannot keep up."""

    nodes: int
    rollouts: int
    per_s: float
    efficiency: float
    utilisation: dict[str, float]
    waits: dict[str, Times]
    coordinator_busy: float


class Coordinator(msgspec.Struct, frozen=True):
    """Its CPU time: ``rollout_s`` for each rollout, ``idle`` of every second whatever happens, and ``agent_s`` of every
    second for each worker and LLM server. ``how``: where this is from, in words."""

    rollout_s: float
    idle: float
    how: str
    agent_s: float = 0.0

    def at_rest(self, nodes: int) -> float:
        """Of every second, with a worker and a server on each node; at most nearly all of it."""
        return min(0.999, self.idle + 2 * nodes * self.agent_s)

    def most_nodes(self, per_node: float) -> float:
        """That it can serve, of so many rollouts/s each."""
        return (1 - self.idle) / (2 * self.agent_s + self.rollout_s * per_node)

    def message_s(self, nodes: int) -> float:
        """Seconds that it takes for a rollout, with what is left of its CPU."""
        return self.rollout_s / (1 - self.at_rest(nodes))


class SimulatedSeries(msgspec.Struct, frozen=True):
    """``why``: why it is not valid, and what to do; empty if it is. ``conclusion``: what the largest size comes to, and
    what saturates at which size, if anything does."""

    fitted_from: list[str]
    base_nodes: int
    coordinator: Coordinator
    checks: list[Check]
    points: list[SimulatedPoint]
    valid: bool
    why: str
    conclusion: str
