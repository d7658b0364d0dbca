"""One attempt at a rollout on one simulated worker."""

from __future__ import annotations

from prorl_hpc.bench.simulation_draws import Fate
from prorl_hpc.bench.simulation_gauges import Place


class Attempt:
    """``gone``: nothing that is foretold of it comes true. ``fault`` is the stage that breaks (-1: none), after
    ``share`` of its time."""

    __slots__ = (
        "attempt_id",
        "began",
        "fate",
        "fault",
        "gone",
        "place",
        "server_id",
        "share",
        "stage",
        "ticket",
        "timed_out",
        "tool_s",
        "turn_s",
        "turns_left",
        "worker_id",
    )

    def __init__(self, attempt_id: str, worker_id: str, fate: Fate, fault: int, share: float) -> None:
        self.attempt_id, self.worker_id, self.fate = attempt_id, worker_id, fate
        self.fault, self.share = fault, share
        self.gone = self.timed_out = False
        self.place: int = Place.INIT
        self.stage = 0
        self.began = 0.0
        """When the stage began."""
        self.server_id = ""
        self.ticket = -1
        """Of the request that a server works on now; -1 if none does."""
        self.turn_s = self.tool_s = 0.0
        """Of each turn: the server's part at full speed, and the sandbox's."""
        self.turns_left = 0
