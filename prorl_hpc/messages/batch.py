"""What a trainer asks for in one step: groups of samples, filtered as DAPO wants them."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from prorl_hpc.messages.rollout import Budgets, RolloutResult, SamplingParams


class GroupFilter(enum.StrEnum):
    """Which groups count towards the batch."""

    INFORMATIVE = "informative"
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): rewards within the group must differ."""
    ALL = "all"
    """Every group counts (held-out evaluation, plain GRPO)."""


class BatchSpec(msgspec.Struct, frozen=True):
    """An order of ``groups_wanted`` groups of ``group_size`` samples.

    ``rows`` is the ordered supply of prompts: the service starts a group from the next row whenever
    the wanted number can no longer be reached by the groups it has in flight, and stops when the batch
    is full or the supply is used up. ``batch_id`` is the client's: the same id again is answered
    with the same batch. Rollout ids are ``{batch_id}.g{row index}.s{sample}``.

    ``max_parallel_groups`` bounds groups in flight (0: groups_wanted). When the batch is full the
    rollouts still in flight are cancelled.
    """

    batch_id: str
    task: str
    rows: list[dict[str, Any]]
    groups_wanted: int
    group_size: int
    filter: GroupFilter = GroupFilter.INFORMATIVE
    sampling: SamplingParams = SamplingParams()
    budgets: Budgets = Budgets()
    priority: int = 50
    policy: str = "policy"
    max_parallel_groups: int = 0
    min_usable_samples: int = 2
    """A group with fewer finished (DONE) samples than this, after retries, is dropped as broken."""


class GroupOutcome(enum.StrEnum):
    """What became of a group."""

    ACCEPTED = "accepted"
    UNIFORM = "uniform"
    BROKEN = "broken"
    CANCELLED = "cancelled"


class GroupResult(msgspec.Struct, frozen=True):
    """One prompt's samples. ``row_index`` is the prompt's place in ``BatchSpec.rows``."""

    group_id: str
    row_index: int
    outcome: GroupOutcome
    rollouts: list[RolloutResult]


class BatchState(enum.StrEnum):
    RUNNING = "running"
    DONE = "done"
    EXHAUSTED = "exhausted"
    """The supply of rows ended before the batch was full; what was accepted is returned."""
    CANCELLED = "cancelled"


class BatchProgress(msgspec.Struct, frozen=True):
    """Where a batch stands; cheap to ask for."""

    batch_id: str
    state: BatchState
    groups_wanted: int
    accepted: int
    uniform: int
    broken: int
    in_flight: int
    rollouts_done: int
    rollouts_failed: int
    rows_used: int
    """Rows 0..rows_used-1 were started; a trainer's data cursor moves on by this number."""


class BatchResult(msgspec.Struct, frozen=True):
    """A finished batch: every group that was started, the dropped ones too (for statistics)."""

    progress: BatchProgress
    groups: list[GroupResult]
    elapsed_s: float
