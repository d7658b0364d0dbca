"""``prorl-hpc cancel JOB_ID``: stop the run that a job carries, found by the job's id."""

from __future__ import annotations

import argparse
from pathlib import Path

from prorl_hpc.cli.stop import stop_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.job import Job


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc cancel", description=__doc__)
    parser.add_argument("job_id", help="as launch and squeue print it")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where run directories lie (run.root)")
    args = parser.parse_args(argv)
    return stop_run(find_run(args.root, args.job_id))


def find_run(root: Path, job_id: str) -> RunDirectory:
    """The newest run under ``root`` with that job. Raises ConfigError."""
    leader = job_id.split("+")[0]
    for file in sorted(root.glob("*/*/jobs/job.json"), reverse=True):
        run = RunDirectory(file.parent.parent.resolve())
        job = Job.open(run)
        if job is not None and job.record.job_id == leader:
            return run
    raise ConfigError(
        f"no run under {root.absolute()} has job {job_id}: give --root, or end a foreign job with scancel {job_id}"
    )
