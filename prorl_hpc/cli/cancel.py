"""``prorl-hpc cancel JOB_ID``: ``stop`` for the run that a job carries, found by the job's id."""

from __future__ import annotations

import argparse
from pathlib import Path

from prorl_hpc.cli.run_choice import job_ids, known_runs
from prorl_hpc.cli.stop import stop_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc cancel", description=__doc__)
    parser.add_argument("job_id", help="as launch and squeue print it")
    parser.add_argument("--root", type=Path, help="look for run directories there (run.root) only")
    parser.add_argument("--now", action="store_true", help="do not wait for rollouts that are under way")
    args = parser.parse_args(argv)
    return stop_run(find_run(args.root, args.job_id), drain_s=0.0 if args.now else None, verb="cancel")


def find_run(root: Path | None, job_id: str) -> RunDirectory:
    """The newest run with that job, of all of the user's or of those under ``root``. Raises ConfigError."""
    leader = job_id.split("+")[0]
    for run in known_runs() if root is None else _runs_under(root):
        if leader in job_ids(run):
            run.check_ours()
            return run
    where = "none of your runs" if root is None else f"no run under {root.absolute()}"
    raise ConfigError(
        f"{where} has job {job_id}: `prorl-hpc status` lists them; end a foreign job with scancel {job_id}"
    )


def _runs_under(root: Path) -> list[RunDirectory]:
    files = sorted(root.glob("*/*/jobs/job.json"), reverse=True)
    return [RunDirectory(file.parent.parent.resolve()) for file in files]
