"""Reward functions of policies, for tests."""

from __future__ import annotations

from prorl_hpc.tasks.protocol import Evaluation, RolloutContext


def halved(evaluation: Evaluation, context: RolloutContext) -> float:
    assert context.trajectory is not None
    return evaluation.reward / 2


async def of_the_row(evaluation: Evaluation, context: RolloutContext) -> float:
    return float(context.spec.row["worth"])


def broken(evaluation: Evaluation, context: RolloutContext) -> float:
    raise KeyError("a bug")


def a_word(evaluation: Evaluation, context: RolloutContext) -> float:
    return "good"  # type: ignore[return-value]


def endless(evaluation: Evaluation, context: RolloutContext) -> float:
    return float("inf")


def of_one(evaluation: Evaluation) -> float:
    return 0.0
