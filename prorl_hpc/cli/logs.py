"""``prorl-hpc logs [RUN] [-f] [--component NAME] [--attempt N] [-n LINES]``: what the processes of a run said.

A component is a process (``worker-0``), a role (``rollout``: coordinator and workers; ``inference``; ``trainer``), a node's
supervisor (``node-0``), ``launcher``, what srun said (``srun-0``), or ``job``: what the batch script said. ``-f`` goes on
through requeues, into the logs of the next attempts, until the run ends for good.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from prorl_hpc.cli.log_follower import LogFollower, last_lines
from prorl_hpc.cli.log_names import log_files, may_come, wanted_names
from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.run_states import run_state

POLL_S = 0.3
STATE_EVERY_S = 2.0
"""How often -f asks whether the run still lives."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc logs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends for good")
    parser.add_argument(
        "-c", "--component", action="append", default=[], metavar="NAME", help="only these logs; may be given again"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="of that attempt (default: the newest)")
    parser.add_argument("-n", "--lines", type=int, default=20, help="last lines of each log (20)")
    args = parser.parse_args(argv)
    run = _attempt(_chosen(args.run), args.attempt)
    files = log_files(run)
    names = wanted_names(args.component, list(files), living=args.follow)
    places = {files[name]: files[name].stat().st_size for name in names}
    for name in names:
        lines = last_lines(files[name], places[files[name]], args.lines)
        if lines and len(names) > 1:
            print(f"==> {name} <==")
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
    if args.follow:
        follow(run, args.component, places, only=args.attempt is not None)
    elif not names:
        print(f"attempt {run.attempt} of {run.run_id} has no logs (yet)")
    return 0


def follow(run: RunDirectory, components: list[str], places: dict[Path, int], *, only: bool) -> None:
    """Print new lines as they come. ``places``: sizes up to which files were printed; ``only``: this attempt's alone."""
    attempt, follower = run.attempt, LogFollower(components, places)
    asked, living = float("-inf"), True
    while True:
        newest = run.newest_attempt
        if time.monotonic() - asked >= STATE_EVERY_S:  # asked before reading, so that the last lines are seen
            living, asked = run_state(run).living, time.monotonic()
        done = newest > attempt or not living
        follower.print_new(RunDirectory(run.path, attempt), last=done)
        if done and (only or newest == attempt):
            return
        if done:
            attempt += 1
            print(f"--- attempt {attempt} ---", flush=True)
            continue
        time.sleep(POLL_S)


def _chosen(given: str | None) -> RunDirectory:
    try:
        return chosen_run(given, to_read=True)
    except RunDirectoryError as error:
        if given is not None and may_come(given):
            raise ConfigError(f"{error}. For the logs of one process: --component {given}") from error
        raise


def _attempt(run: RunDirectory, number: int | None) -> RunDirectory:
    """``run`` with one attempt for all that follows. Raises ConfigError."""
    numbers = [attempt.attempt for attempt in run.all_attempts()]
    if number is not None and number not in numbers:
        raise ConfigError(f"--attempt {number}: {run.run_id} has the attempts {', '.join(map(str, numbers))}")
    return RunDirectory(run.path, number if number is not None else run.newest_attempt)
