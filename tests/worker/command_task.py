"""A task that runs the row's shell command in INIT, for a long time if the command does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext


class CommandTask:
    def __init__(self, task: TaskConfig) -> None:
        pass

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        return []

    def check_row(self, row: Mapping[str, Any]) -> None:
        pass

    async def init(self, context: RolloutContext) -> None:
        await self._do(context)

    async def run(self, context: RolloutContext) -> None:
        await self._do(context)

    async def eval(self, context: RolloutContext) -> Evaluation:
        await self._do(context)
        return Evaluation(1.0)

    async def _do(self, context: RolloutContext) -> None:
        await context.sandbox.call("bash", {"command": context.spec.row["command"]}, 1000)
