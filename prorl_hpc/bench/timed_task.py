"""The benches' task: stages that sleep as long as the row says, or do nothing; no sandbox is touched, no LLM is asked.

It notes how long each rollout waited between the end of a stage and the start of the next, on this process's clock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping
from typing import Any

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext

TASK_NAME = "prorl_hpc.bench.timed_task:TimedTask"

stage_delays_s = array("d")
"""Seconds from the end of INIT to the start of RUN, and from the end of RUN to the start of EVAL, as they came."""

evaluations = 0
"""EVALs that ended in this process."""


class TimedTask:
    """Implements tasks.protocol.AgentHandler. A row: ``id`` and, in seconds, ``init_s``, ``run_s``, ``eval_s``; ``tokens``: of
    a trajectory that nobody generated, about."""

    def __init__(self, task: TaskConfig) -> None:
        self._task = task

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{seed}-{number}"} for number in range(size)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        for name in ("init_s", "run_s", "eval_s", "tokens"):
            if not isinstance(row.get(name, 0.0), int | float) or row.get(name, 0.0) < 0:
                raise ValueError(f"{name}={row[name]!r}: expected a number, 0 or more")

    async def init(self, context: RolloutContext) -> None:
        await self._stage(context, "init_s")

    async def run(self, context: RolloutContext) -> None:
        if tokens := int(context.spec.row.get("tokens", 0)):
            context.require_conversation().append([Message("user", "a b " * (tokens // 4))])
        await self._stage(context, "run_s")

    async def eval(self, context: RolloutContext) -> Evaluation:
        global evaluations
        await self._stage(context, "eval_s")
        evaluations += 1
        return Evaluation(1.0)

    async def _stage(self, context: RolloutContext, name: str) -> None:
        ended: float | None = context.notes.get("ended")
        if ended is not None:
            stage_delays_s.append(time.monotonic() - ended)
        if (seconds := context.spec.row.get(name, 0.0)) > 0:
            await asyncio.sleep(seconds)
        context.notes["ended"] = time.monotonic()
