"""What the journal gives back after a restart: orders that have not ended, with all that was recorded of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from prorl_hpc.core.groups import CarriedGroup
from prorl_hpc.messages.batch import BatchSpec
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec

__all__ = ["CarriedGroup", "OpenBatch", "OpenRollout"]


@dataclass(frozen=True)
class OpenBatch:
    """A batch without a result, or one whose groups go on. Results are slim: their trajectories are empty."""

    spec: BatchSpec
    carried: tuple[CarriedGroup, ...]
    before: tuple[RolloutResult, ...]
    """Of carried groups' rollouts: what was recorded before this batch was accepted, in order."""
    log: tuple[RolloutResult | None, ...]
    """What was recorded for this batch since, in order; None where the batch was cancelled."""
    attempts: dict[str, int]
    """The highest attempt noted of each rollout that has not ended."""
    state: str
    """``running``, or ``full``: its result is recorded, but groups that it carries on are not taken over yet."""
    spared: dict[str, int] = field(default_factory=dict)
    """How many attempts of those rollouts used up no retry, where there are any."""
    asleep: bool = False
    """Nobody has asked for it since the attempt of the run began."""


@dataclass(frozen=True)
class OpenRollout:
    """A rollout submitted by itself that has not ended. ``attempt``: the highest noted, at least 1; ``spared`` of those
    before it used up no retry."""

    spec: RolloutSpec
    attempt: int
    spared: int = 0
