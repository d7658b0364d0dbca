"""What the attempts before this one mean for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop, read_ending, read_stop

log = logging.getLogger(__name__)


def why_not_go_on(run: RunDirectory, attempts_of_job: Iterable[int]) -> str:
    """Slurm starts a job again also when its run was over: why there is nothing to do, for people; empty if there is.
    Somebody's wish to stop holds too when the attempt was cut off before it could follow it."""
    for number in attempts_of_job:
        attempt = RunDirectory(run.path, number)
        ended, order = read_ending(attempt), read_stop(attempt)
        if (ended is not None and ended.ending is Ending.FINISHED) or attempt.finished_marker.exists():
            return f"attempt {number} finished the run"
        if ended is not None and ended.ending is Ending.STOPPED:
            return f"attempt {number} was stopped ({ended.reason})"
        if ended is None and order is not None and order.ending is Ending.STOPPED:
            return f"attempt {number} was to stop ({order.reason})"
    return ""


def fence_earlier_attempts(run: RunDirectory) -> None:
    """Tell what may be left of earlier attempts, on nodes that Slurm does not reach any more, to end."""
    for earlier in run.all_attempts():
        if earlier.attempt < run.attempt and read_ending(earlier) is None and earlier.state.exists():
            try:
                order_stop(earlier, StopOrder(Ending.SUSPENDED, f"attempt {run.attempt} has begun"))
            except OSError as error:
                log.warning("attempt %d cannot be told that it is over: %s", earlier.attempt, error)
