"""The record of an attempt that is over, and the report of its run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import RunStatus, TrainerStatus
from prorl_hpc.slurm.endings import AttemptEnding, Ending, NodeEnd, read_ending, read_node_end, write_ending
from prorl_hpc.slurm.failure import RunFailure, record_failure
from prorl_hpc.slurm.plan import Plan

log = logging.getLogger(__name__)
_ENDED = ("done", "failed", "timed_out", "cancelled")


def conclude(
    run: RunDirectory,
    plan: Plan,
    ending: Ending,
    reason: str,
    job_id: str = "",
    lost_nodes: list[str] | None = None,
    *,
    goes_on: bool = False,
) -> AttemptEnding:
    """Write ``ending.json`` and the report, if that can be done; returns what was to be written. An attempt that is to go
    on, but after several in a row that finished nothing, is recorded as failed."""
    earlier = [read_ending(one) for one in run.all_attempts() if one.attempt < run.attempt]
    before = [ended for ended in earlier if ended is not None]
    nodes = [end for rank in range(len(plan.nodes)) if (end := read_node_end(run, rank)) is not None]
    record = AttemptEnding(
        ending,
        reason,
        time.time(),
        job=job_id,
        exit_code=1 if ending is Ending.FAILED else 0,
        goes_on=goes_on,
        # An attempt that was over before anybody counted got no further than the one before.
        steps=max([_steps(run), *(end.steps for end in before[-1:])]),
        rollouts=max([_rollouts(run), *(end.rollouts for end in before[-1:])]),
        processes=[process for node in nodes for process in node.processes],
        lost_nodes=lost_nodes or [],
    )
    if goes_on and (stuck := _stuck(run, record, before)):
        _write("its failure", lambda: record_failure(run, RunFailure("the run", "", stuck)))
        record = msgspec.structs.replace(record, ending=Ending.FAILED, reason=stuck, exit_code=1, goes_on=False)
    _write("its ending", lambda: write_ending(run, record))
    _tell_left(nodes)
    _write_report(run)
    return record


def _steps(run: RunDirectory) -> int:
    status = read_json(run.trainer_status_file, TrainerStatus)
    return status.step if status is not None else -1


def _rollouts(run: RunDirectory) -> int:
    status = read_json(run.status_file, RunStatus)
    return sum(status.rollouts.get(word, 0) for word in _ENDED) if status is not None else -1


def _stuck(run: RunDirectory, record: AttemptEnding, before: list[AttemptEnding]) -> str:
    """Why going on is pointless, for people; empty if it is not."""
    allowed = run.load_config().cluster.requeue_without_progress
    reached = [(0, 0), *((max(0, end.steps), max(0, end.rollouts)) for end in (*before, record))]
    last = reached[-allowed - 1 :]
    if len(last) <= allowed or len({*last}) > 1:
        return ""
    return (
        f"made no progress in {allowed} attempt{'s' * (allowed > 1)}: no training step and no rollout was finished "
        f"(cluster.requeue_without_progress={allowed}); the last ended because {record.reason}"
    )


def _write(what: str, write: Callable[[], object]) -> None:
    """The job must end, recorded or not."""
    try:
        write()
    except OSError:
        log.exception("the attempt is over, and %s could not be written", what)


def _tell_left(nodes: list[NodeEnd]) -> None:
    for node in nodes:
        if node.left:
            log.error("node %s still has: %s", node.node, "; ".join(node.left))


def _write_report(run: RunDirectory) -> None:
    from prorl_hpc.observe.report import write_report

    try:
        write_report(run)
    except Exception:  # the run's own ending must not be hidden by a report that cannot be drawn
        log.exception("the report could not be written")
