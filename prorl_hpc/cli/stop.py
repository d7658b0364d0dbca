"""``prorl-hpc stop [RUN_DIR]``: end a run in order. A checkpoint stays; ``resume`` goes on with it."""

from __future__ import annotations

import argparse

from prorl_hpc.cli.attempt import STOP_LIMIT_S, stop
from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.job import Job


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc stop", description=__doc__)
    add_run_argument(parser)
    return stop_run(chosen_run(parser.parse_args(argv).run))


def stop_run(run: RunDirectory) -> int:
    """Stop it and say so; exit code 1 if it has not ended in time."""
    job = Job.open(run)
    if job is None or not job.alive():
        print(f"{run.run_id} does not run")
        return 0
    if not stop(run, job, "prorl-hpc stop", max(STOP_LIMIT_S, run.load_config().run.stop_timeout_s + 7.0)):
        return 1
    print(f"stopped; go on with: prorl-hpc resume {run.path}")
    return 0
