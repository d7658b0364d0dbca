"""Numbers of a batch of rollouts, for metrics.jsonl (its keys are told in observe.metrics) and TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prorl_hpc.messages.batch import BatchResult, GroupOutcome
from prorl_hpc.messages.rollout import RolloutResult, Status


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def rollout_metrics(result: BatchResult, weight_version: int) -> dict[str, Any]:
    """Rewards and lengths over all finished rollouts, those of dropped groups too; counts of groups and failures.
    Groups that go on into a later batch are counted as ``groups_carried`` and have their rollouts counted there.
    ``staleness``: mean age in versions of the tokens that the policy wrote. Values that do not exist are left out."""
    carried = sum(group.outcome is GroupOutcome.CARRIED for group in result.groups)
    rollouts = [r for group in result.groups if group.outcome is not GroupOutcome.CARRIED for r in group.rollouts]
    done = [r for r in rollouts if r.status is Status.DONE]
    broken = [r for r in rollouts if r.status in (Status.FAILED, Status.TIMED_OUT)]
    accepted = [r for g in result.groups if g.outcome is GroupOutcome.ACCEPTED for r in g.rollouts]
    progress = result.progress
    generated = [_generated(r) for r in done]
    ages = [
        (weight_version - s.weight_version, len(s.token_ids))
        for r in accepted
        for conversation in r.trajectory.conversations
        for s in conversation.segments
        if s.trained and s.weight_version is not None
    ]
    found = {
        "reward": mean(_rewards(done)),
        "reward_accepted": mean(_rewards([r for r in accepted if r.status is Status.DONE])),
        "success": mean([float(x >= 1.0) for x in _rewards(done)]),
        "rollouts": len(done),
        "rollouts_failed": len(broken),
        "groups_accepted": progress.accepted,
        "groups_uniform": progress.uniform,
        "groups_broken": progress.broken,
        "groups_carried": carried or None,
        "failures": dict(Counter(_kind(r) for r in broken)),
        "response_tokens": mean([float(n) for n in generated]),
        "truncated": mean([float(r.trajectory.truncated) for r in done]),
        "finish": finish_shares(done),
        "branches": mean([float(len(r.trajectory.branches)) for r in done]),
        "turns": mean([r.metrics["turns"] for r in done if "turns" in r.metrics]),
        "tokens_generated": sum(_generated(r) for r in rollouts),
        "tokens_total": sum(part.num_tokens for r in rollouts for part in r.trajectory.conversations),
        "staleness": sum(age * n for age, n in ages) / sum(n for _, n in ages) if ages else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def evaluation_metrics(result: BatchResult) -> dict[str, Any]:
    """Held-out rewards over finished rollouts; those that broke are counted, never taken as 0."""
    rollouts = [r for group in result.groups for r in group.rollouts]
    done = [r for r in rollouts if r.status is Status.DONE]
    rewards = _rewards(done)
    found = {
        "reward": mean(rewards),
        "successes": sum(x >= 1.0 for x in rewards),
        "rollouts": len(rewards),
        "rollouts_failed": sum(r.status in (Status.FAILED, Status.TIMED_OUT) for r in rollouts),
        "response_tokens": mean([float(_generated(r)) for r in done]),
    }
    return {key: value for key, value in found.items() if value is not None}


def finish_shares(rollouts: Sequence[RolloutResult]) -> dict[str, float] | None:
    """Share of each reason for which main conversations ended; those of which nobody said are ``unknown``. None without
    rollouts."""
    counts = Counter(r.trajectory.finish.value or "unknown" for r in rollouts)
    return {finish: n / len(rollouts) for finish, n in sorted(counts.items())} or None


def _generated(rollout: RolloutResult) -> int:
    return sum(conversation.num_trained_tokens for conversation in rollout.trajectory.conversations)


def _rewards(rollouts: Sequence[RolloutResult]) -> list[float]:
    return [r.reward for r in rollouts if r.reward is not None]


def _kind(rollout: RolloutResult) -> str:
    return rollout.failure.kind.value if rollout.failure is not None else rollout.status.value


class TensorBoard:
    """The same numbers as TensorBoard scalars, under ``step/`` and ``eval/``."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _flat(record):
            if name not in ("step", "time"):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._writer.flush()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found.append((prefix + key, float(value)))
    return found
