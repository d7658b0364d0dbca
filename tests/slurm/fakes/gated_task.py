"""A task without a model: a rollout runs until its row's gate, a file, is there. Each run leaves a line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext


class GatedTask:
    def __init__(self, task: TaskConfig) -> None:
        self._gates = Path(task.options["gates"])

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        return []

    def check_row(self, row: Mapping[str, Any]) -> None:
        pass

    async def init(self, context: RolloutContext) -> None:
        pass

    async def run(self, context: RolloutContext) -> None:
        gate = self._gates / f"gate-{context.spec.row['gate']}"
        while not gate.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def eval(self, context: RolloutContext) -> Evaluation:
        return Evaluation(1.0)
