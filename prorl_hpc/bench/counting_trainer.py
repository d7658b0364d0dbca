"""``python -m prorl_hpc.bench.counting_trainer --run-dir DIR --name NAME``: a trainer that learns nothing and counts.

It does what the trainer does with the service, over the same client: a batch per step, a checkpoint after each, on
SIGTERM it leaves off and the next attempt goes on from the checkpoint with the same batch. Every step that it trained
leaves a line in ``<run>/steps.jsonl`` (StepNote).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult, BatchSpec, GroupFilter
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.rollout import Status
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.process import Process, process_arguments, run_to_end, stop_event, unless_stopped
from prorl_hpc.service.client import RolloutClient

RUN_S = 1.0
"""Seconds of each rollout in RUN."""


class StepNote(msgspec.Struct, frozen=True):
    """A step that was trained in ``attempt``: the rollouts that came back done, and those that did not."""

    step: int
    attempt: int
    done: list[str]
    not_done: list[str]


def order(process: Process, step: int) -> BatchSpec:
    """The batch of ``step``, the same in every attempt."""
    settings, task = process.config.trainer, process.config.task.name
    rows = [{"id": f"{step}-{number}", "run_s": RUN_S} for number in range(settings.groups_per_step)]
    return BatchSpec(
        f"step-{step}", task, rows, len(rows), settings.group_size, filter=GroupFilter.ALL, client="trainer"
    )


def read_steps(run: RunDirectory) -> list[StepNote]:
    """As they were trained, over all attempts."""
    file = _steps_file(run)
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=StepNote) for line in lines]


def _steps_file(run: RunDirectory) -> Path:
    return run.path / "steps.jsonl"


def _checkpoint(run: RunDirectory) -> Path:
    return run.checkpoints / "counted.json"


async def train(process: Process) -> None:
    """To the last step, or until SIGTERM."""
    stop, run, steps = stop_event(), process.run, process.config.trainer.steps
    step: int = read_json(_checkpoint(run), int) or 0
    process.ready(detail="training")
    if await unless_stopped(process.wait_for("coordinator", process.config.run.start_timeout_s), stop) is None:
        return
    async with RolloutClient.for_run(process) as client:
        while step < steps:
            _say(process, step)
            result = await unless_stopped(_rollouts(client, order(process, step + 1)), stop)
            if result is None:
                return
            step += 1
            _note(run, step, result)
            write_json(_checkpoint(run), step)
    _say(process, step)
    run.finished_marker.write_text(f"{steps} steps\n")


async def _rollouts(client: RolloutClient, spec: BatchSpec) -> BatchResult:
    await client.submit_batch(spec)
    return await client.wait_batch(spec.batch_id)


def _note(run: RunDirectory, step: int, result: BatchResult) -> None:
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    done = [r.rollout_id for r in rollouts if r.status is Status.DONE]
    note = StepNote(step, run.attempt, done, [r.rollout_id for r in rollouts if r.status is not Status.DONE])
    with _steps_file(run).open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(note) + b"\n")


def _say(process: Process, step: int) -> None:
    status = TrainerStatus("rollouts", step, process.config.trainer.steps, time.time())
    write_json(process.run.trainer_status_file, status)


def main() -> int:
    arguments = process_arguments("bench.counting_trainer")
    process = Process.start("trainer", arguments.run_dir, arguments.name)
    return run_to_end(process, train(process))


if __name__ == "__main__":
    sys.exit(main())
