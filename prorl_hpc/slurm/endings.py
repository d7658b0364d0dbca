"""Why an attempt ends: the order to stop that all its nodes see, and the record that stays.

An attempt is *finished* (training is done), *stopped* (somebody wanted that), *suspended* (time limit, preemption, lost
node: the run goes on as the next attempt), or *failed*. The order is ``state/STOP``: whoever writes it first is right.
"""

from __future__ import annotations

import enum
import time
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.slurm.marks import make_mark, read_mark


class Ending(enum.StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    SUSPENDED = "suspended"
    FAILED = "failed"


OUT_OF_TIME = "the allocation ends soon"
"""The reason to leave off before a time limit."""


def signalled_by_slurm(name: str) -> str:
    """The reason to leave off when a signal of that name ends a job's processes: Slurm says no more."""
    return f"{name} from Slurm: cancelled, preempted or requeued"


class StopOrder(msgspec.Struct, frozen=True):
    """``ending``: STOPPED or SUSPENDED. ``reason``: for people. ``drain_s``: for so long rollouts that are under way
    may end, while none is started; the trainer saves its checkpoint at once. ``limit_s``: seconds from the order until
    what still runs is killed, if that is more than run.stop_timeout_s after the drain."""

    ending: Ending
    reason: str
    drain_s: float = 0.0
    limit_s: float = 0.0
    time: float = 0.0


class ProcessEnd(msgspec.Struct, frozen=True):
    """How one process of the attempt ended: ``how`` is for people, ``exit_code`` negative for a signal."""

    name: str
    node: str
    exit_code: int | None
    how: str


class NodeEnd(msgspec.Struct, frozen=True):
    """``state/node-<rank>.ended``, written by the node's supervisor last of all. ``left``: what it could not end."""

    rank: int
    node: str
    processes: list[ProcessEnd] = []
    left: list[str] = []


class AttemptEnding(msgspec.Struct, frozen=True):
    """``attempts/<n>/ending.json``. ``goes_on``: the job was put back into the queue by us. ``steps`` and ``rollouts``:
    training steps done and rollouts recorded in the whole run by then, -1 if unknown: what tells progress."""

    ending: Ending
    reason: str
    time: float
    job: str = ""
    exit_code: int = 0
    goes_on: bool = False
    steps: int = -1
    rollouts: int = -1
    processes: list[ProcessEnd] = []
    lost_nodes: list[str] = []


def order_stop(run: RunDirectory, order: StopOrder) -> StopOrder:
    """Write the order unless there is one; returns the one that holds. Whole or not at all. Raises OSError."""
    stamped = msgspec.structs.replace(order, time=time.time())
    return stamped if make_mark(run.stop_marker, stamped) else read_stop(run) or stamped


def read_stop(run: RunDirectory) -> StopOrder | None:
    """The order to stop of this attempt, if there is one. That it is there counts: one without the form of an order is
    somebody's wish, and so is one that cannot be read."""
    try:
        found = read_mark(run.stop_marker, StopOrder)
    except OSError as error:
        return StopOrder(Ending.STOPPED, f"state/STOP is there but cannot be read: {error.strerror}")
    if not isinstance(found, str):
        return found
    if found.startswith("{"):
        return StopOrder(Ending.STOPPED, "state/STOP is there but does not read as an order")
    return StopOrder(Ending.STOPPED, found or "state/STOP says no reason")


def write_ending(run: RunDirectory, ending: AttemptEnding) -> None:
    write_json(run.ending_file, ending)


def read_ending(run: RunDirectory) -> AttemptEnding | None:
    """How this attempt ended; None while it runs, or if it was cut off."""
    return read_json(run.ending_file, AttemptEnding)


def read_node_end(run: RunDirectory, rank: int) -> NodeEnd | None:
    return read_json(node_end_file(run, rank), NodeEnd)


def node_end_file(run: RunDirectory, rank: int) -> Path:
    return run.state / f"node-{rank}.ended"


def lost_mark(run: RunDirectory, rank: int) -> Path:
    """Made by the launcher when it has given that node up: a supervisor that is still there leaves, without a word to the
    others."""
    return run.state / f"node-{rank}.lost"
