"""Whether a run's held-out rows are taken from its training file."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.config.schema import TaskConfig

HELD_OUT_SHARE = 10
"""At most one row in so many is held out, and at least one."""


def holds_out(task: TaskConfig) -> bool:
    """Whether rows of the training file are held out for evaluation, since no file is given for that."""
    return bool(task.train.path and not task.heldout.path)


def held_out_rows(task: TaskConfig) -> int | None:
    """How many held-out rows there are; None where the file does not say (it is not there, or elsewhere)."""
    named = task.heldout.path or task.train.path
    if not named:
        return task.heldout.size
    path = Path(named).expanduser()
    try:
        if not path.is_file():  # of one that is something else, whoever reads it tells
            return None
        with path.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
    except OSError:
        return None
    return min(task.heldout.size, max(1, lines // HELD_OUT_SHARE)) if holds_out(task) else lines


def told_held_out(task: TaskConfig) -> str:
    """Which rows those are, for people."""
    return (
        f"task.heldout.size={task.heldout.size} rows of {task.train.path}, at most a tenth of them, are held out and not "
        f"trained on, drawn by task.heldout.seed={task.heldout.seed}"
    )
