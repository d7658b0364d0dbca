"""The timed task that also writes down when each rollout's INIT began to work: its sandbox is there by then."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.timed_task import TimedTask
from prorl_hpc.config.run_directory import ATTEMPT
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.tasks.protocol import RolloutContext
from prorl_hpc.tasks.registry import check_options

NOTED_TASK = "prorl_hpc.bench.noted_task:NotedTask"


class InitNote(msgspec.Struct, frozen=True):
    """``time``: seconds since the epoch; ``attempt``: of the run."""

    time: float
    attempt: int
    rollout_id: str


class NotedTask(TimedTask):
    """``task.options.notes``: the file that gets one InitNote a line, from all workers."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ["notes"])
        super().__init__(task)
        self._notes = Path(task.options["notes"])

    async def init(self, context: RolloutContext) -> None:
        note = InitNote(time.time(), int(os.environ[ATTEMPT]), context.spec.rollout_id)
        with self._notes.open("ab", buffering=0) as file:  # one write, which the kernel appends whole
            file.write(msgspec.json.encode(note) + b"\n")
        await super().init(context)


def read_notes(file: Path) -> Sequence[InitNote]:
    """As they came; none while there is no file."""
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=InitNote) for line in whole.splitlines()]
