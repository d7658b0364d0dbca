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
    RequestServers,
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
    """``left``: it was told to go, and said so; what it had is not to blame."""

    worker_id: str
    reason: str
    left: bool = False


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
    """``left`` as in WorkerLost."""

    server_id: str
    reason: str
    left: bool = False


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
class Hold:
    """As a pause, of its own beside it and beside those of other holders, and over by itself after ``for_s`` seconds. A holder's
    next one takes the place of its last, 0 ends it."""

    holder: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """From now on no rollout starts, for good, and a failure that would be tried again uses up no retry: everything
    is about to end. Those that have started go on."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A rollout that was accepted by an earlier process. ``attempt``: the highest number known; ``spared``: how many
    attempts before it used up no retry; ``asleep``: it starts only when it is woken."""

    spec: RolloutSpec
    attempt: int = 1
    spared: int = 0
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class Recover:
    """For ``grace_s`` the rollouts wait for a worker that still holds them; then they are started anew."""

    rollouts: tuple[Unfinished, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """Rollouts that were recovered asleep may start; others are passed over."""

    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent a few times a second."""


Event = (
    Submit
    | Cancel
    | Recover
    | Wake
    | WorkerJoined
    | WorkerLost
    | WorkerDrains
    | ServerSeen
    | ServerLost
    | ServerDrains
    | ServerTrouble
    | Pause
    | Hold
    | Drain
    | Tick
    | StageFinished
    | Discarded
)


class Order(msgspec.Struct, frozen=True):
    """Send ``message`` to the worker."""

    worker_id: str
    message: StartInit | StartRun | StartEval | MoveRun | RequestServers | Discard


class Ended(msgspec.Struct, frozen=True):
    """A rollout ended; said exactly once for each that was accepted. ``result`` is slim, ``trajectory`` apart;
    ``attempt_id`` names the attempt that it ended as."""

    result: RolloutResult
    trajectory: bytes | None = None
    attempt_id: str = ""


class Retried(msgspec.Struct, frozen=True):
    """A rollout starts again as ``attempt``; ``spared`` of those before used up no retry."""

    rollout_id: str
    attempt: int
    spared: int = 0


Command = Order | Ended | Retried
