"""``prorl-hpc resume [RUN_DIR]``: the same run in the same directory, from its newest checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prorl_hpc.cli.attempt import run_attempt
from prorl_hpc.cli.preflight import preflight
from prorl_hpc.cli.run_choice import add_run_argument, chosen_run, link_latest
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.transport.keys import RunKeys


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc resume", description=__doc__)
    add_run_argument(parser)
    parser.add_argument("--detach", action="store_true", help="come back as soon as the job is submitted")
    args = parser.parse_args(argv)
    run = chosen_run(args.run)
    config = run.load_config()
    job = Job.open(run)
    if job is not None and job.alive():
        raise RunError(f"{run.path} still runs as {job.description}: stop it first with `prorl-hpc stop {run.path}`")
    if run.finished_marker.exists():
        print(f"{run.run_id} is finished: there is nothing to go on with. Its report: {run.report_file}")
        return 0
    if errors := [*validate(config), *preflight(config)]:
        print("\n".join(["The run cannot go on:", *(f"  - {error}" for error in errors)]), file=sys.stderr)
        return 2
    RunKeys.load(run.keys)
    link_latest(run, Path(config.run.root))
    return run_attempt(run, config, make_plan(config), detach=args.detach)
