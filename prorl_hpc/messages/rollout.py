"""A rollout: what is asked for, where it stands, how it ended."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from prorl_hpc.messages.trajectory import Finish, Trajectory


class Stage(enum.StrEnum):
    """The three stages that take a pool's slot and a rollout's clock."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class Status(enum.StrEnum):
    """QUEUED → INIT → READY → RUN → RAN → EVAL → DONE, or one of the last three from anywhere."""

    QUEUED = "queued"
    INIT = "init"
    READY = "ready"
    RUN = "run"
    RAN = "ran"
    EVAL = "eval"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (Status.DONE, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED)


class FailureKind(enum.StrEnum):
    """Whose fault it was. Only ``policy`` is the model's; ``infrastructure``, ``sandbox`` and
    ``inference`` are retried on another node and are never reported as reward 0."""

    POLICY = "policy"
    TASK = "task"
    SANDBOX = "sandbox"
    INFERENCE = "inference"
    INFRASTRUCTURE = "infrastructure"

    @property
    def retryable(self) -> bool:
        return self in (FailureKind.SANDBOX, FailureKind.INFERENCE, FailureKind.INFRASTRUCTURE)


class Failure(msgspec.Struct, frozen=True):
    """Where and why a rollout broke."""

    stage: Stage | None
    kind: FailureKind
    message: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the engine samples one turn. ``max_tokens`` bounds one turn; ``seed`` makes it repeatable."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    """The turn ends where its text has come to contain one of these; the tokens up to there stay."""


class Budgets(msgspec.Struct, frozen=True):
    """Seconds a rollout may spend *in* each stage and in all of them; ``wall_s`` is the hard cap
    that counts queues too."""

    init_s: float = 60.0
    run_s: float = 300.0
    eval_s: float = 60.0
    total_s: float = 360.0
    wall_s: float = 3600.0


class RolloutSpec(msgspec.Struct, frozen=True):
    """One rollout as the coordinator and its workers know it.

    ``task`` names an AgentHandler; ``row`` is the dataset row that this handler understands.
    ``group_id`` joins the samples of one prompt; ``sample`` counts them from 0. ``priority`` is 0 to 100,
    the lower the sooner, in the service's queues as in the engine's. ``client`` names who asks: clients of the same
    priority get equal shares. ``budgets`` None: those of the run's configuration. ``policy``: one of the run's, or ``any``:
    drawn by ``rollout.policy_weights``, alike for all of a ``group_id``.
    """

    rollout_id: str
    task: str
    row: dict[str, Any]
    group_id: str = ""
    sample: int = 0
    sampling: SamplingParams = SamplingParams()
    budgets: Budgets | None = None
    priority: int = 50
    policy: str = "policy"
    client: str = ""


class StageTiming(msgspec.Struct, frozen=True):
    """Seconds waited for a slot and seconds spent in it."""

    stage: Stage
    queued_s: float
    busy_s: float


class RolloutResult(msgspec.Struct, frozen=True):
    """How a rollout ended; well-formed also when it broke.

    ``reward`` is None unless ``status`` is DONE. ``trajectory`` is partial when it broke in RUN. ``policy``: the one that
    was drawn, where the order named ``any``. ``finish`` is the trajectory's; ``generated_tokens`` counts those of its
    branches too.
    """

    rollout_id: str
    group_id: str
    sample: int
    task: str
    status: Status
    reward: float | None = None
    metrics: dict[str, float] = {}
    trajectory: Trajectory = Trajectory()
    failure: Failure | None = None
    timings: list[StageTiming] = []
    attempts: int = 1
    worker: str = ""
    server: str = ""
    row_id: str = ""
    policy: str = "policy"
    finish: Finish = Finish.UNKNOWN
    generated_tokens: int = 0


class RolloutProgress(msgspec.Struct, frozen=True):
    """Where a rollout stands; cheap to ask for. ``batch_id`` is empty for one that was submitted by itself."""

    rollout_id: str
    status: Status
    attempts: int = 1
    worker: str = ""
    server: str = ""
    batch_id: str = ""
    policy: str = "policy"


class NumberedResult(msgspec.Struct, frozen=True):
    """A line of the stream of results. Asking again from ``cursor`` goes on behind it."""

    cursor: int
    result: RolloutResult
