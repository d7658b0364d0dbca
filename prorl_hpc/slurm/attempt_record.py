"""The record of an attempt that is over, and the report of its run."""

from __future__ import annotations

import logging
import time

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import RunStatus, TrainerStatus
from prorl_hpc.slurm.endings import AttemptEnding, Ending, NodeEnd, read_ending, read_node_end, write_ending
from prorl_hpc.slurm.failure import RunFailure, read_failure, record_failure
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
    """Write ``ending.json`` and the report; returns what was written. An attempt that is to go on, but after several
    in a row that finished nothing, is recorded as failed."""
    earlier = [read_ending(one) for one in run.all_attempts() if one.attempt < run.attempt]
    before = [ended for ended in earlier if ended is not None]
    nodes = [end for rank in range(len(plan.nodes)) if (end := read_node_end(run, rank)) is not None]
    failure = read_failure(run)
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
        failure = RunFailure("the run", nodes[0].node if nodes else "", stuck)
        record_failure(run, failure)
        record = msgspec.structs.replace(record, ending=Ending.FAILED, reason=stuck, exit_code=1, goes_on=False)
    write_ending(run, record)
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
    last = before[-allowed:]
    if len(last) < allowed or any((e.steps, e.rollouts) != (record.steps, record.rollouts) for e in last):
        return ""
    return (
        f"made no progress in {allowed + 1} attempts: no training step and no rollout was finished in them "
        f"(cluster.requeue_without_progress={allowed}); the last ended because {record.reason}"
    )


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
