"""The end of an attempt in a Slurm job: its record, and the job back in the queue if it is to go on."""

from __future__ import annotations

import logging
import subprocess
import time

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.attempt_record import conclude
from prorl_hpc.slurm.endings import AttemptEnding, Ending
from prorl_hpc.slurm.plan import Plan

log = logging.getLogger(__name__)
ANSWER_S = 20.0
TRIES = 3
PAUSE_S = 2.0
_NO_ANSWER = ("Unable to contact", "Socket timed out", "Communication", "Connection", "timed out")


def conclude_job(
    run: RunDirectory,
    plan: Plan,
    job_id: str,
    ending: Ending,
    reason: str,
    lost_nodes: list[str],
    *,
    wanted: bool,
) -> AttemptEnding:
    """Record how the attempt ended, and put the job back into the queue if that is ``wanted`` and of use. Returns what was
    recorded in the end."""
    record = conclude(run, plan, ending, reason, job_id, lost_nodes, goes_on=wanted)
    if not record.goes_on:
        return record
    refusal = requeue_job(run, job_id)
    if not refusal:
        log.info("the job is back in the queue and goes on as attempt %d", run.attempt + 1)
        return record
    log.error("the job could not be put back into the queue: %s", refusal)
    return conclude(run, plan, ending, f"{reason}; scontrol requeue said: {refusal}", job_id, lost_nodes)


def requeue_job(run: RunDirectory, job_id: str) -> str:
    """Put the job back into the queue; returns what Slurm has against it, or nothing. Its processes are signalled. A
    controller that does not answer is asked again, unless the next attempt has begun meanwhile: it would be ended."""
    said = ""
    for left in reversed(range(TRIES)):
        if run.newest_attempt > run.attempt:
            return f"attempt {run.newest_attempt} has begun already"
        said, final = _ask_to_requeue(job_id)
        if final or not left:
            break
        log.warning("scontrol requeue %s: %s", job_id, said)
        time.sleep(PAUSE_S)
    return said


def _ask_to_requeue(job_id: str) -> tuple[str, bool]:
    """What Slurm said, and whether it is its last word."""
    try:
        done = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_S:.0f} s", False
    except OSError as error:
        return str(error), True
    if done.returncode <= 0:  # a signal: the requeue's own, to all processes of the job
        return "", True
    said = (done.stderr or done.stdout).strip() or f"scontrol exited with {done.returncode}"
    return said, not any(words in said for words in _NO_ANSWER)
