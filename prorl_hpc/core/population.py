"""The rollouts that live: accepted, waiting, tried again, ended exactly once."""

from __future__ import annotations

from collections import Counter

from prorl_hpc.core.deadlines import Deadlines
from prorl_hpc.core.events import Command, Ended, Recover, Retried
from prorl_hpc.core.life import Life
from prorl_hpc.core.waiting_line import WaitingLine
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage, Status


class Population:
    """``said`` is where commands go."""

    def __init__(self, said: list[Command], *, retries: int) -> None:
        """``retries``: attempts beyond the first."""
        self._said = said
        self._retries = retries
        self.lives: dict[str, Life] = {}
        """Those that have not ended, in the order of their acceptance."""
        self.counts: Counter[Status] = Counter()
        self.line = WaitingLine()
        self.walls: Deadlines[str] = Deadlines()
        """When each has taken too long, queues counted."""
        self.ending: dict[str, Life] = {}
        """By attempt: those whose verdict is passed, but whose trajectory is waited for."""
        self._orphans: set[str] = set()
        """Recovered, and not known to be on any worker; they wait for one that still holds them."""
        self._orphans_until = 0.0

    def accept(self, spec: RolloutSpec, now: float) -> Life:
        """Begin a life; it does not wait in line yet. ValueError for an id that lives."""
        if spec.rollout_id in self.lives:
            raise ValueError(f"rollout {spec.rollout_id} is already under way")
        life = Life(spec, self.line.rank(spec), 0.0, now)
        life.wall_end = now + life.budgets.wall_s
        self.lives[spec.rollout_id] = life
        self.counts[Status.QUEUED] += 1
        self.walls.add(life.wall_end, spec.rollout_id)
        return life

    def recover(self, event: Recover, now: float) -> None:
        """Take up rollouts of an earlier process; they stay out of the line for the grace."""
        for spec, attempt in event.rollouts:
            self.accept(spec, now).attempt = attempt
            self._orphans.add(spec.rollout_id)
        self._orphans_until = now + event.grace_s

    def adopted(self, rollout_id: str) -> None:
        """A worker holds it."""
        self._orphans.discard(rollout_id)

    def end_grace(self, now: float) -> None:
        """Put those whom nobody held in time into the line."""
        if self._orphans and now >= self._orphans_until:
            for rollout_id in sorted(self._orphans):
                self.line.push(self.lives[rollout_id])
            self._orphans.clear()

    def retry_or_fail(
        self, life: Life, failure: Failure, now: float, *, timed_out: bool = False, blame: bool = True
    ) -> None:
        """After the attempt left its worker. ``blame``: try elsewhere next time, if there is an elsewhere."""
        if not failure.kind.retryable or life.attempt > self._retries:
            self.end(life, Status.TIMED_OUT if timed_out else Status.FAILED, failure)
            return
        if blame:
            life.avoid_workers |= {life.worker}
            if failure.kind is FailureKind.INFERENCE and life.server:
                life.avoid_servers |= {life.server}
        self.counts[life.status] -= 1
        self.counts[Status.QUEUED] += 1
        life.try_again(now)
        self._said.append(Retried(life.spec.rollout_id, life.attempt))
        self.line.push(life)

    def end(
        self,
        life: Life,
        status: Status,
        failure: Failure | None = None,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
    ) -> None:
        if status is Status.DONE and reward is None:
            status = Status.FAILED
            failure = Failure(Stage.EVAL, FailureKind.TASK, f"EVAL of task {life.spec.task} ended without a reward")
        self.enter(life, status, life.since)
        del self.lives[life.spec.rollout_id]
        self.ending.pop(life.attempt_id, None)
        self._orphans.discard(life.spec.rollout_id)
        self.line.left(life.spec)
        self._said.append(Ended(life.result(status, failure, reward, metrics or {}), life.trajectory))

    def await_last_word(self, life: Life, status: Status, failure: Failure) -> None:
        """It will end so when its worker has given up what it had."""
        life.verdict = (status, failure)
        self.ending[life.attempt_id] = life

    def end_as_ruled(self, life: Life, trajectory: bytes | None) -> None:
        """The wait for its ``trajectory`` is over, with it or without."""
        assert life.verdict is not None
        if trajectory is not None:
            life.trajectory = trajectory
        self.end(life, *life.verdict)

    def enter(self, life: Life, status: Status, now: float) -> None:
        self.counts[life.status] -= 1
        self.counts[status] += 1
        life.enter(status, now)
