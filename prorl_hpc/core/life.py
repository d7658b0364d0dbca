"""One rollout from its acceptance to its end.

An *attempt* is one try at it on one worker. Workers know attempts, not rollouts: ``a`` is the first attempt
at the rollout ``a``, ``a#2`` the second. Whatever still comes from an earlier attempt bears its name and so
cannot be taken for the present one's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from prorl_hpc.messages.rollout import Budgets, Failure, RolloutResult, RolloutSpec, Stage, StageTiming, Status
from prorl_hpc.messages.trajectory import Finish

_DEFAULT_BUDGETS = Budgets()
_STATUS = {stage: Status(stage.value) for stage in Stage}
ATTEMPT_MARK = "#"
"""Not allowed in rollout ids."""


def attempt_id_of(rollout_id: str, attempt: int) -> str:
    return rollout_id if attempt == 1 else f"{rollout_id}{ATTEMPT_MARK}{attempt}"


Rank = tuple[int, int, int, int]
"""Smaller goes first: (priority, fair-share tag, age of the group, age of the rollout)."""

_NOBODY: frozenset[str] = frozenset()


def split_attempt_id(attempt_id: str) -> tuple[str, int]:
    """Rollout id and attempt number, 0 if there is no such attempt."""
    rollout_id, mark, number = attempt_id.partition(ATTEMPT_MARK)
    if not mark:
        return rollout_id, 1
    return rollout_id, int(number) if number.isdecimal() else 0


@dataclass(slots=True)
class Life:
    """``since`` is when the present status began. What the worker has said of it is the present
    attempt's: ``worker``, ``server``, ``timings``, ``trajectory`` and what is told of that."""

    spec: RolloutSpec
    rank: Rank
    wall_end: float
    since: float
    status: Status = Status.QUEUED
    attempt: int = 1
    spared: int = 0
    """How many earlier attempts count for nothing: they were cut off by what was no fault of theirs."""
    worker: str = ""
    server: str = ""
    trajectory: bytes | None = None
    finish: Finish = Finish.UNKNOWN
    generated_tokens: int = 0
    timings: list[StageTiming] = field(default_factory=list)
    queued_s: float = 0.0
    """Seconds the present stage was waited for."""
    avoid_workers: frozenset[str] = _NOBODY
    avoid_servers: frozenset[str] = _NOBODY
    verdict: tuple[Status, Failure] | None = None
    """How it ends once its worker has given up what it had."""

    @property
    def budgets(self) -> Budgets:
        return self.spec.budgets or _DEFAULT_BUDGETS

    @property
    def attempt_id(self) -> str:
        return attempt_id_of(self.spec.rollout_id, self.attempt)

    @property
    def tries(self) -> int:
        """Attempts that count, the present one included."""
        return self.attempt - self.spared

    @property
    def attempt_spec(self) -> RolloutSpec:
        """The spec as the worker gets it."""
        return self.spec if self.attempt == 1 else msgspec.structs.replace(self.spec, rollout_id=self.attempt_id)

    def enter(self, status: Status, now: float) -> None:
        self.status, self.since = status, now

    def begin(self, stage: Stage, now: float) -> None:
        """A stage starts: its wait is over and its clock runs."""
        self.queued_s = now - self.since
        self.status, self.since = _STATUS[stage], now

    def end_stage(self, stage: Stage, busy_s: float, now: float) -> None:
        """Note a stage's time; ``busy_s`` is the worker's word, and cannot be more than has passed here."""
        self.timings.append(StageTiming(stage, self.queued_s, min(max(busy_s, 0.0), now - self.since)))

    def budget_s(self, stage: Stage) -> float:
        """Seconds that ``stage`` may take: its own budget, or what the stages before left of the total."""
        budgets = self.budgets
        spent_s = 0.0
        for timing in self.timings:
            spent_s += timing.busy_s
        own_s = budgets.run_s if stage is Stage.RUN else budgets.init_s if stage is Stage.INIT else budgets.eval_s
        return min(own_s, budgets.total_s - spent_s)

    def try_again(self, now: float) -> None:
        """Back to the queue as the next attempt, with a fresh clock for the stages; the wall cap stays."""
        self.attempt += 1
        self.worker = self.server = ""
        self.trajectory, self.timings, self.queued_s = None, [], 0.0
        self.finish, self.generated_tokens = Finish.UNKNOWN, 0
        self.enter(Status.QUEUED, now)

    def result(
        self, status: Status, failure: Failure | None, reward: float | None, metrics: dict[str, float]
    ) -> RolloutResult:
        """Slim: the trajectory is kept apart, as the bytes that the worker sent."""
        spec = self.spec
        return RolloutResult(
            rollout_id=spec.rollout_id,
            group_id=spec.group_id,
            sample=spec.sample,
            task=spec.task,
            status=status,
            reward=reward if status is Status.DONE else None,
            metrics=metrics,
            failure=failure,
            timings=self.timings,
            attempts=self.tries,
            worker=self.worker,
            server=self.server,
            row_id=str(spec.row.get("id", "")),
            policy=spec.policy,
            finish=self.finish,
            generated_tokens=self.generated_tokens,
        )
