"""What the rollouts of each policy came to: counted as they end, and counted anew from the journal after a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from prorl_hpc.messages.rollout import RolloutResult, StageTiming, Status
from prorl_hpc.messages.status import PolicyStatus
from prorl_hpc.messages.trajectory import Finish


class EndedRollout(msgspec.Struct, frozen=True):
    """The fields of RolloutResult that are counted."""

    status: Status
    reward: float | None = None
    timings: list[StageTiming] = []
    policy: str = "policy"
    finish: Finish = Finish.UNKNOWN
    generated_tokens: int = 0


def seconds_of(rollout: EndedRollout | RolloutResult) -> float:
    """From its start to its end, queues included."""
    return sum(timing.queued_s + timing.busy_s for timing in rollout.timings)


@dataclass
class _Figures:
    rollouts: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0
    reward: float = 0.0
    seconds: float = 0.0
    generated_tokens: int = 0


class PolicyFigures:
    """``names``: policies that are shown though nothing of theirs has ended."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._of: dict[str, _Figures] = {name: _Figures() for name in names}

    def count(self, rollout: EndedRollout | RolloutResult) -> None:
        of = self._of.setdefault(rollout.policy, _Figures())
        of.rollouts[rollout.status.value] += 1
        of.generated_tokens += rollout.generated_tokens
        if rollout.finish:
            of.finishes[rollout.finish.value] += 1
        if rollout.status is Status.DONE and rollout.reward is not None:
            of.rewarded += 1
            of.reward += rollout.reward
            of.seconds += seconds_of(rollout)

    def statuses(self, served: dict[str, tuple[int, int, int]]) -> list[PolicyStatus]:
        """``served``: policy → newest weight version, servers, those that get assignments."""
        names = [*self._of, *(name for name in served if name not in self._of)]
        return [self._status(name, served.get(name, (0, 0, 0))) for name in names]

    def _status(self, name: str, served: tuple[int, int, int]) -> PolicyStatus:
        of = self._of.get(name, _Figures())
        return PolicyStatus(
            name,
            *served,
            rollouts=dict(of.rollouts),
            reward=of.reward / of.rewarded if of.rewarded else None,
            seconds=of.seconds / of.rewarded if of.rewarded else None,
            finishes=dict(of.finishes),
            generated_tokens=of.generated_tokens,
        )
