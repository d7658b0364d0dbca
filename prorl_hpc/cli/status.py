"""``prorl-hpc status [RUN_DIR]``: where a run stands."""

from __future__ import annotations

import argparse
import json
import time

from rich.console import Console

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.display import render
from prorl_hpc.observe.snapshot import SnapshotReader
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc status", description=__doc__)
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the display")
    args = parser.parse_args(argv)
    run = chosen_run(args.run_dir)
    job = Job.open(run)
    word, state = run_word(run, job), job_state(job)
    snapshot = SnapshotReader(run).read()
    if args.json:
        processes = {p.name: {"node": p.node, "phase": p.phase, "detail": p.detail} for p in snapshot.processes}
        service = snapshot.run
        told = {
            "run": str(run.path),
            "status": word,
            "job": job and job.record.job_id,
            "job_state": state,
            "step": snapshot.trainer.step if snapshot.trainer else None,
            "rewards": snapshot.rewards,
            "processes": processes,
            "restarts": [str(restart) for restart in snapshot.restarts],
            "paused": service is not None and service.paused,
            "draining": [w.worker_id for w in service.workers if w.draining]
            + [s.server_id for s in service.servers if s.draining]
            if service
            else [],
        }
        print(json.dumps(told))
        return 0
    Console().print(render(run.run_id, snapshot, time.time() - job.record.submitted if job else 0.0))
    print(f"{run.path}: {word}" + (f" ({job.description}: {state})" if job else ""))
    if (failure := read_failure(run)) is not None:
        print(failure)
    return 0


def run_word(run: RunDirectory, job: Job | None) -> str:
    """One word: waiting, running, finished, failed, stopped, ended (without a word), or unknown."""
    if job is None:
        return "not submitted"
    try:
        if job.alive():
            return "waiting" if job.waiting() else "running"
    except RunError:
        return "unknown"
    if run.failure_file.exists():
        return "failed"
    if run.finished_marker.exists():
        return "finished"
    return "stopped" if run.stop_marker.exists() else "ended"


def job_state(job: Job | None) -> str:
    """The job's state, or why it is unknown."""
    if job is None:
        return ""
    try:
        return job.state()
    except RunError as error:
        return str(error)
