"""Numbers of a batch of rollouts; what the keys mean is told in observe.metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import stdev
from typing import Any

from prorl_hpc.messages.batch import BatchResult, GroupOutcome
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.trainer.advantages import ROUNDING
from prorl_hpc.trainer.batches import TrainingBatch


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def rollout_metrics(result: BatchResult) -> dict[str, Any]:
    """Rewards and lengths over all finished rollouts, those of dropped groups too; counts of groups and failures.
    Groups that go on into a later batch are counted as ``groups_carried`` and have their rollouts counted there.
    Values that do not exist are left out."""
    carried = sum(group.outcome is GroupOutcome.CARRIED for group in result.groups)
    rollouts = [r for group in result.groups if group.outcome is not GroupOutcome.CARRIED for r in group.rollouts]
    done = _done(rollouts)
    broken = [r for r in rollouts if r.status in (Status.FAILED, Status.TIMED_OUT)]
    accepted = [r for g in result.groups if g.outcome is GroupOutcome.ACCEPTED for r in g.rollouts]
    equal = [g for g in result.groups if g.outcome is GroupOutcome.ACCEPTED and _are_equal(_rewards(_done(g.rollouts)))]
    progress = result.progress
    generated = [_generated(r) for r in done]
    found = {
        "reward": mean(_rewards(done)),
        "reward_std": stdev(_rewards(done)) if len(_rewards(done)) > 1 else None,
        "reward_by_task": _reward_by_task(done),
        "reward_accepted": mean(_rewards(_done(accepted))),
        "success": mean([float(x >= 1.0) for x in _rewards(done)]),
        "rollouts": len(done),
        "rollouts_failed": len(broken),
        "groups_accepted": progress.accepted,
        "groups_equal_rewards": len(equal),
        "groups_uniform": progress.uniform,
        "groups_broken": progress.broken,
        "groups_replaced": max(0, progress.accepted + progress.uniform + progress.broken - progress.groups_wanted),
        "groups_carried": carried or None,
        "failures": dict(Counter(_kind(r) for r in broken)),
        "response_tokens": mean([float(n) for n in generated]),
        "response_tokens_max": max(generated, default=None),
        "truncated": mean([float(r.trajectory.truncated) for r in done]),
        "finish": finish_shares(done),
        "branches": mean([float(len(r.trajectory.branches)) for r in done]),
        "turns": mean([r.metrics["turns"] for r in done if "turns" in r.metrics]),
        "tokens_generated": sum(_generated(r) for r in rollouts),
        "tokens_total": sum(part.num_tokens for r in rollouts for part in r.trajectory.conversations),
        "generation_s": result.elapsed_s,
    }
    return {key: value for key, value in found.items() if value is not None}


def token_ages(result: BatchResult, batch: TrainingBatch, version: int, oldest: int) -> dict[str, float]:
    """``staleness`` and ``staleness_max``: age in weight versions, mean and largest, of the tokens that the policy wrote in the
    groups of ``batch``, which are of ``oldest`` or newer. Empty without such tokens."""
    trained = {sample.group_id for sample in batch.samples} | {sample.group_id for sample in batch.left_out}
    ages = [
        (version - segment.weight_version, len(segment.token_ids))
        for group in result.groups
        if group.outcome is GroupOutcome.ACCEPTED and group.group_id in trained
        for rollout in group.rollouts
        if rollout.status is Status.DONE
        for conversation in rollout.trajectory.conversations
        for segment in conversation.segments
        # One that is older can only be of a conversation that overlong filtering leaves out.
        if segment.trained and segment.weight_version is not None and segment.weight_version >= oldest
    ]
    tokens = sum(n for _, n in ages)
    if not tokens:
        return {}
    return {"staleness": sum(age * n for age, n in ages) / tokens, "staleness_max": max(age for age, _ in ages)}


def speeds(record: dict[str, Any], result: BatchResult, seconds: dict[str, float]) -> dict[str, float]:
    """Per second: rollouts and generated tokens while the batch was being made, which need not be while the trainer waited;
    computed and trained tokens while it trained."""
    found = {"rollouts_per_s": ("rollouts", result.elapsed_s), "tokens_per_s": ("tokens_generated", result.elapsed_s)}
    if (training := seconds.get("training")) is not None:
        found["training_tokens_per_s"] = ("tokens_computed", training)
        found["trained_tokens_per_s"] = ("tokens_trained", training)
    return {name: record[amount] / max(span, 1e-9) for name, (amount, span) in found.items()}


def evaluation_metrics(result: BatchResult) -> dict[str, Any]:
    """Held-out rewards over finished rollouts; those that broke are counted, never taken as 0."""
    rollouts = [r for group in result.groups for r in group.rollouts]
    done = _done(rollouts)
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


def _done(rollouts: Sequence[RolloutResult]) -> list[RolloutResult]:
    return [r for r in rollouts if r.status is Status.DONE]


def _are_equal(rewards: Sequence[float]) -> bool:
    """As the advantages see it; of one or none, too: there is nothing to compare with."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ROUNDING * max(map(abs, rewards))


def _generated(rollout: RolloutResult) -> int:
    return sum(conversation.num_trained_tokens for conversation in rollout.trajectory.conversations)


def _rewards(rollouts: Sequence[RolloutResult]) -> list[float]:
    return [r.reward for r in rollouts if r.reward is not None]


def _reward_by_task(rollouts: Sequence[RolloutResult]) -> dict[str, float | None]:
    by_task: dict[str, list[RolloutResult]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task].append(rollout)
    return {task: mean(_rewards(of)) for task, of in sorted(by_task.items())}


def _kind(rollout: RolloutResult) -> str:
    return rollout.failure.kind.value if rollout.failure is not None else rollout.status.value
