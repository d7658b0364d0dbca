"""Whether a run's held-out rows are taken from its training file."""

from __future__ import annotations

from prorl_hpc.config.schema import TaskConfig

HELD_OUT_SHARE = 10
"""At most one row in so many is held out, and at least one."""


def holds_out(task: TaskConfig) -> bool:
    """Whether rows of the training file are held out for evaluation, since no file is given for that."""
    return bool(task.train.path and not task.heldout.path)


def told_held_out(task: TaskConfig) -> str:
    """Which rows those are, for people."""
    return (
        f"task.heldout.size={task.heldout.size} rows of {task.train.path}, at most a tenth of them, are held out and not "
        f"trained on, drawn by task.heldout.seed={task.heldout.seed}"
    )
