"""Reward functions of single policies (``policies.NAME.reward``): the task's score made into this policy's reward.

    def shorter_is_better(evaluation: Evaluation, context: RolloutContext) -> float:
        return evaluation.reward - 0.001 * evaluation.metrics["turns"]

It is called on the worker, in EVAL, with what the task's ``eval`` returned and the rollout's context (its spec, trajectory,
notes and sandbox). It may be ``async``; a plain one must not block, for it shares the event loop with all rollouts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import cast

from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.tasks.importing import import_told
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext

Reward = Callable[[Evaluation, RolloutContext], float | Awaitable[float]]
TASK_REWARD = "task_reward"
"""The metric that keeps the task's own reward where a policy has another."""


class RewardError(RunError):
    """A reward function broke; the rollout fails by the task's fault."""


class PolicyReward:
    """``policies.<policy>.reward``, imported. Raises ConfigError if it is no function that can be."""

    def __init__(self, policy: str, path: str) -> None:
        self._told = f"policies.{policy}.reward={path}"
        self._function = _import(self._told, path)

    async def of(self, scored: Evaluation, context: RolloutContext) -> Evaluation:
        """``scored`` with this policy's reward, and the task's own in the metrics. RewardError names the function."""
        try:
            reward = self._function(scored, context)
            reward = await reward if inspect.isawaitable(reward) else reward
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self._told} broke: {type(error).__name__}: {error}") from error
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise RewardError(f"{self._told} returned {reward!r}: expected a finite number")
        return Evaluation(float(reward), scored.metrics | {TASK_REWARD: scored.reward})


def _import(told: str, path: str) -> Reward:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{told}: expected module:function, like my_package.rewards:shorter_is_better")
    module = import_told(told, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
        raise ConfigError(f"{told}: {module_name} has no function {name!r}; it has: {', '.join(known) or 'none'}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{told}: cannot be called with (evaluation, context): {error}") from error
    except ValueError:  # a builtin that tells nothing of itself
        pass
    return cast("Reward", function)
