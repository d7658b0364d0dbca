"""What the scheduler is told (events) and what it wants done (commands).

Stage results need no event of their own: the workers' messages StageFinished and Discarded are events.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    MoveRun,
    Pools,
    ServerRef,
    ServerTrouble,
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
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDrains:
    """``on``: it gets no new rollouts; what it has goes on."""

    worker_id: str
    on: bool


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
class ServerDrains:
    """``on``: it is assigned no more; what it has goes on."""

    server_id: str
    on: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """``on``: no rollout starts; those that have started go on."""

    on: bool


@dataclass(frozen=True, slots=True)
class Recover:
    """Rollouts that were accepted by an earlier process, with the highest attempt number known of each. For
    ``grace_s`` they wait for a worker that still holds them; then they are started anew."""

    rollouts: tuple[tuple[RolloutSpec, int], ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent a few times a second."""


Event = (
    Submit
    | Cancel
    | Recover
    | WorkerJoined
    | WorkerLost
    | WorkerDrains
    | ServerSeen
    | ServerLost
    | ServerDrains
    | ServerTrouble
    | Pause
    | Tick
    | StageFinished
    | Discarded
)


class Order(msgspec.Struct, frozen=True):
    """Send ``message`` to the worker."""

    worker_id: str
    message: StartInit | StartRun | StartEval | MoveRun | Discard


class Ended(msgspec.Struct, frozen=True):
    """A rollout ended; said exactly once for each that was accepted. ``result`` is slim, ``trajectory`` apart."""

    result: RolloutResult
    trajectory: bytes | None = None


class Retried(msgspec.Struct, frozen=True):
    """A rollout starts again as ``attempt``."""

    rollout_id: str
    attempt: int


Command = Order | Ended | Retried
