"""What the scheduler is told (events) and what it wants done (commands).

Stage results need no event of their own: the workers' messages StageFinished and Discarded are events.
"""

from __future__ import annotations

from dataclasses import dataclass

from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Pools,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec


@dataclass(frozen=True, slots=True)
class Submit:
    """Accept rollouts; their ids are new."""

    specs: tuple[RolloutSpec, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End rollouts as CANCELLED; ids that are unknown or finished are passed over."""

    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker said Hello, for the first time or again. ``held``: the attempts that live on it now."""

    worker_id: str
    pools: Pools
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """An LLM server joined, or reported how it is."""

    ref: ServerRef
    weight_version: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class ServerLost:
    server_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent a few times a second."""


Event = Submit | Cancel | WorkerJoined | WorkerLost | ServerSeen | ServerLost | Tick | StageFinished | Discarded


@dataclass(frozen=True, slots=True)
class Order:
    """Send ``message`` to the worker."""

    worker_id: str
    message: StartInit | StartRun | StartEval | Discard


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout ended; said exactly once for each that was accepted."""

    result: RolloutResult


Command = Order | Ended
