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


class WhenFull(enum.StrEnum):
    """What becomes of the groups in flight when a batch has all that it wants."""

    CANCEL = "cancel"
    CARRY = "carry"
    """They go on, and the same client's next batch with ``when_full=carry`` takes them over with all that they have."""


class Refill(enum.StrEnum):
    """When groups that were dropped are replaced."""

    AT_ONCE = "at_once"
    IN_ROUNDS = "in_rounds"
    """Only when every group in flight has ended: the synchronous batch that others use (to compare with)."""


class BatchSpec(msgspec.Struct, frozen=True):
    """An order of ``groups_wanted`` groups of ``group_size`` samples.

    ``rows`` is the ordered supply of prompts: the service starts a group from the next row whenever
    the wanted number can no longer be reached by the groups it has in flight, and stops when the batch
    is full or the supply is used up. ``batch_id`` is the client's: the same id again is answered
    with the same batch. Rollout ids are ``{batch_id}.g{row index}.s{sample}``.

    ``max_parallel_groups`` bounds groups in flight (0: groups_wanted). When the batch is full the
    rollouts still in flight are cancelled, or carried on, as ``when_full`` says. ``client`` and ``budgets`` as in
    RolloutSpec; so is ``policy``: of a batch for ``any``, each group has one policy.
    """

    batch_id: str
    task: str
    rows: list[dict[str, Any]]
    groups_wanted: int
    group_size: int
    filter: GroupFilter = GroupFilter.INFORMATIVE
    sampling: SamplingParams = SamplingParams()
    budgets: Budgets | None = None
    priority: int = 50
    policy: str = "policy"
    client: str = ""
    when_full: WhenFull = WhenFull.CANCEL
    refill: Refill = Refill.AT_ONCE
    max_parallel_groups: int = 0
    min_usable_samples: int = 2
    """A group with fewer finished (DONE) samples than this, after retries, is dropped as broken."""


class GroupOutcome(enum.StrEnum):
    """What became of a group."""

    ACCEPTED = "accepted"
    UNIFORM = "uniform"
    BROKEN = "broken"
    CANCELLED = "cancelled"
    CARRIED = "carried"
    """It goes on, and is part of a later batch."""


class GroupResult(msgspec.Struct, frozen=True):
    """One prompt's samples. ``row_index`` is the prompt's place in ``BatchSpec.rows``, of the batch ``carried_from``
    if that is not empty: the group was started there."""

    group_id: str
    row_index: int
    outcome: GroupOutcome
    rollouts: list[RolloutResult]
    carried_from: str = ""


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
    carried_in: int = 0
    """Groups taken over from the batch before."""


class BatchResult(msgspec.Struct, frozen=True):
    """A finished batch: every group that was started, the dropped ones too (for statistics)."""

    progress: BatchProgress
    groups: list[GroupResult]
    elapsed_s: float
