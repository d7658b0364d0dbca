"""When the parts of an attempt came up, in seconds since its job's first instruction.

The first instruction is the first line that the batch script itself runs, before our Python starts: MARK, put into
``cluster.setup``, notes the time there, and again in front of the supervisor on every node.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.plan import Plan

_BATCH = "step="


def mark_line(file: Path) -> str:
    """A line of shell: time, restarts of the job, and which step it is, with what the shell has itself."""
    # without ${}, which would be the configuration's own
    return f'echo "$EPOCHREALTIME restarts=$SLURM_RESTART_COUNT step=$SLURM_STEP_ID" >>{shlex.quote(str(file))}'


class Marks:
    """Of one attempt; ``file``: where ``mark_line`` writes, of this job alone."""

    def __init__(self, file: Path, run: RunDirectory) -> None:
        self._run = run
        lines = [line.split() for line in file.read_text().splitlines()]
        restarts = "" if run.attempt == 1 else str(run.attempt - 1)
        own = [(float(at), step) for at, restarted, step in lines if restarted == f"restarts={restarts}"]
        self.first = min(at for at, step in own if step == _BATCH)
        """Seconds since the epoch."""
        self._steps = [at for at, step in own if step != _BATCH]

    def since_first(self) -> dict[str, float]:
        """What came up when; of several the last one. Processes that are not ready yet are left out."""
        times = {"launcher": _began(self._run.logs / "launcher.log"), "steps": max(self._steps)}
        ups = [path.stat().st_mtime for path in self._run.state.glob("node-*.up")]
        times["supervisors"] = max(ups)
        plan = read_json(self._run.plan_file, Plan)
        for process in plan.processes if plan is not None else []:
            state = read_json(self._run.process_state(process.name), ProcessState)
            if state is not None and state.phase is Phase.READY:
                times[f"{process.role} ready"] = max(state.updated, times.get(f"{process.role} ready", 0.0))
        return {what: at - self.first for what, at in sorted(times.items(), key=lambda item: item[1])}


def allocated_at(controller_log: Path, job_id: str, attempt: int) -> float:
    """Seconds since the epoch at which the controller gave the job its nodes for ``attempt``, by its own log."""
    began = [line for line in controller_log.read_text().splitlines() if f"Started JobId={job_id}" in line]
    stamps = [line[1:].partition("]")[0] for line in began if f"JobId={job_id}+0" in line or f"({job_id})" in line]
    return _stamp(stamps[attempt - 1])


def _stamp(words: str) -> float:
    """``2026-01-31T12:00:00.123``, local time."""
    whole, _, part = words.partition(".")
    return time.mktime(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{part or 0}")


def _began(log: Path) -> float:
    """The time of the first line of a log of ours."""
    with log.open() as lines:
        day, clock, *_ = lines.readline().split()
    return _stamp(f"{day}T{clock.replace(',', '.')}")
