"""The rollouts that live: accepted, waiting, tried again, ended exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

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
        self._asleep: set[str] = set()
        """Recovered, and not to start before they are woken; their wall does not come nearer."""
        self.draining = False

    def accept(self, spec: RolloutSpec, now: float) -> Life:
        """Begin a life; it does not wait in line yet. ValueError for an id that lives."""
        life = self._begin(spec, now)
        self._build_wall(life, now)
        return life

    def recover(self, event: Recover, now: float) -> None:
        """Take up rollouts of an earlier process; they stay out of the line for the grace, or until they are woken."""
        for one in event.rollouts:
            life = self._begin(one.spec, now)
            life.attempt, life.spared = one.attempt, one.spared
            if one.asleep:
                self._asleep.add(one.spec.rollout_id)
                continue
            self._build_wall(life, now)
            if event.grace_s > 0:
                self._orphans.add(one.spec.rollout_id)
            else:
                self.line.push(life)
        self._orphans_until = now + event.grace_s

    def wake(self, rollout_ids: Iterable[str], now: float) -> None:
        for rollout_id in rollout_ids:
            if rollout_id in self._asleep:
                self._asleep.remove(rollout_id)
                self._build_wall(self.lives[rollout_id], now)
                self.line.push(self.lives[rollout_id])

    def adopted(self, rollout_id: str, now: float) -> None:
        """A worker holds it."""
        self._orphans.discard(rollout_id)
        if rollout_id in self._asleep:
            self._asleep.remove(rollout_id)
            self._build_wall(self.lives[rollout_id], now)

    def end_grace(self, now: float) -> None:
        """Put those whom nobody held in time into the line."""
        if self._orphans and now >= self._orphans_until:
            for rollout_id in sorted(self._orphans):
                self.line.push(self.lives[rollout_id])
            self._orphans.clear()

    def retry_or_fail(
        self,
        life: Life,
        failure: Failure,
        now: float,
        *,
        timed_out: bool = False,
        blame: bool = True,
        spare: bool = False,
    ) -> None:
        """After the attempt left its worker. ``blame``: try elsewhere next time, if there is an elsewhere. ``spare``:
        it uses up no retry; nor does any while draining."""
        spare = spare or self.draining
        if not failure.kind.retryable or (life.tries > self._retries and not spare):
            self.end(life, Status.TIMED_OUT if timed_out else Status.FAILED, failure)
            return
        if blame:
            life.avoid_workers |= {life.worker}
            if failure.kind is FailureKind.INFERENCE and life.server:
                life.avoid_servers |= {life.server}
        self.counts[life.status] -= 1
        self.counts[Status.QUEUED] += 1
        life.spared += spare
        life.try_again(now)
        self._said.append(Retried(life.spec.rollout_id, life.attempt, life.spared))
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
        self._asleep.discard(life.spec.rollout_id)
        self.line.left(life.spec)
        result = life.result(status, failure, reward, metrics or {})
        self._said.append(Ended(result, life.trajectory, life.attempt_id))

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

    def _begin(self, spec: RolloutSpec, now: float) -> Life:
        if spec.rollout_id in self.lives:
            raise ValueError(f"rollout {spec.rollout_id} is already under way")
        life = self.lives[spec.rollout_id] = Life(spec, self.line.rank(spec), inf, now)
        self.counts[Status.QUEUED] += 1
        return life

    def _build_wall(self, life: Life, now: float) -> None:
        life.wall_end = now + life.budgets.wall_s
        self.walls.add(life.wall_end, life.spec.rollout_id)

    def enter(self, life: Life, status: Status, now: float) -> None:
        self.counts[life.status] -= 1
        self.counts[status] += 1
        life.enter(status, now)
