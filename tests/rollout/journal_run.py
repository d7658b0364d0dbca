"""What the journal's tests record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_shelf import ShelfLimits

TRAJECTORY = Trajectory(
    segments=[Segment([1, 2, 3]), Segment([4, 5], logprobs=[-0.5, -0.25], trained=True, weight_version=7)],
    messages=[Message("user", "how many?"), Message("assistant", "twelve")],
)
RAW = msgspec.msgpack.encode(TRAJECTORY)


async def open_journal(
    directory: Path,
    epoch: str = "epoch-1",
    *,
    attempt: int = 1,
    keep: bool = True,
    limits: ShelfLimits | None = None,
) -> Journal:
    store = RolloutStore(RunDirectory(directory)) if keep else None
    return await Journal.open(directory / "journal.sqlite", epoch=epoch, attempt=attempt, store=store, limits=limits)


def single(name: str, **more: Any) -> RolloutSpec:
    return RolloutSpec(name, "noop", {"id": name}, **more)


def batch(name: str, rows: int = 2, **more: Any) -> BatchSpec:
    return BatchSpec(name, "noop", [{"id": f"{name}-{i}"} for i in range(rows)], groups_wanted=1, group_size=2, **more)


def ended(name: str, status: Status = Status.DONE, **more: Any) -> RolloutResult:
    reward = 1.0 if status is Status.DONE else None
    group, _, sample = name.rpartition(".s") if ".s" in name else ("", "", "0")
    return RolloutResult(name, group, int(sample), "noop", status, reward=reward, worker="w-0", **more)


def finished(
    name: str, groups: dict[int, list[RolloutResult]], outcome: GroupOutcome = GroupOutcome.ACCEPTED
) -> BatchResult:
    done = sum(len(rollouts) for rollouts in groups.values())
    progress = BatchProgress(name, BatchState.DONE, 1, len(groups), 0, 0, 0, done, 0, len(groups))
    results = [GroupResult(f"{name}.g{row}", row, outcome, rollouts) for row, rollouts in groups.items()]
    return BatchResult(progress, results, 1.5)
