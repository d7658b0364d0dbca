"""A scheduler to be told events, and everything that it has said."""

from __future__ import annotations

from typing import Any

import msgspec

from prorl_hpc.core.events import (
    Command,
    Ended,
    Event,
    Order,
    ServerSeen,
    Submit,
    WorkerJoined,
)
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.control import (
    Discard,
    Held,
    MoveRun,
    Pools,
    ServerRef,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Segment, Trajectory

TRAJECTORY = msgspec.msgpack.encode(Trajectory([Segment([1, 2, 3])]))


class Bench:
    """A scheduler and everything it has said."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = Scheduler(**settings)
        self.now = 0.0
        self.said: list[Command] = []

    def tell(self, event: Event, at: float | None = None) -> list[Command]:
        self.now = at if at is not None else self.now
        commands = self.scheduler.handle(event, self.now)
        self.said += commands
        return commands

    def worker(self, worker_id: str = "w", pools: Pools | None = None, held: tuple[Held, ...] = ()) -> list[Command]:
        return self.tell(WorkerJoined(worker_id, pools or Pools(2, 4, 4, 2), held))

    def server(self, server_id: str = "s", version: int = 0, *, healthy: bool = True, policy: str = "policy") -> None:
        self.tell(ServerSeen(ServerRef(server_id, "n", "ipc://x", "", policy), version, healthy))

    def submit(self, *names: str, **fields: Any) -> list[Command]:
        return self.tell(Submit(tuple(RolloutSpec(name, "t", {"id": name}, **fields) for name in names)))

    def ends(self, name: str, stage: Stage, worker: str = "w", **fields: Any) -> list[Command]:
        if stage is Stage.EVAL and "failure" not in fields:
            fields.setdefault("reward", 1.0)
        if stage is Stage.RUN:
            fields.setdefault("trajectory", TRAJECTORY)
        return self.tell(StageFinished(worker, name, stage, **fields))

    def breaks(self, name: str, stage: Stage, kind: FailureKind, worker: str = "w", **fields: Any) -> list[Command]:
        return self.ends(name, stage, worker, failure=Failure(stage, kind, "broke"), **fields)

    @property
    def started(self) -> list[tuple[str, str, str]]:
        """(stage, attempt, worker) of every stage that was started."""
        found = []
        for command in self.said:
            if isinstance(command, Order):
                message = command.message
                if isinstance(message, StartInit):
                    found.append(("init", message.spec.rollout_id, command.worker_id))
                elif isinstance(message, StartRun | StartEval):
                    found.append((type(message).__name__[5:].lower(), message.rollout_id, command.worker_id))
        return found

    @property
    def discarded(self) -> list[tuple[str, str]]:
        orders = [c for c in self.said if isinstance(c, Order) and isinstance(c.message, Discard)]
        return [(o.worker_id, o.message.rollout_id) for o in orders]  # type: ignore[union-attr]

    @property
    def results(self) -> dict[str, RolloutResult]:
        return {c.result.rollout_id: c.result for c in self.said if isinstance(c, Ended)}

    @property
    def trajectories(self) -> dict[str, bytes | None]:
        return {c.result.rollout_id: c.trajectory for c in self.said if isinstance(c, Ended)}

    @property
    def moved(self) -> list[tuple[str, str | None]]:
        orders = [c.message for c in self.said if isinstance(c, Order) and isinstance(c.message, MoveRun)]
        return [(order.rollout_id, order.server.server_id if order.server else None) for order in orders]
