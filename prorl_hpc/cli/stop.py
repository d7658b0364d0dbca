"""``prorl-hpc stop [RUN] [--now] [--drain SECONDS]``: end a run in order. ``resume`` goes on with it.

No rollout is started any more, those under way may end for run.drain_s, and the trainer saves a checkpoint at once; what
was finished is recorded. A run that waits in the queue, for the first time or between two attempts, is cancelled for good.
"""

from __future__ import annotations

import argparse
import sys

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.cli.stopping import Stopping
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.endings import Ending, StopOrder
from prorl_hpc.slurm.run_states import NOT_SUBMITTED, UNKNOWN, run_state

MARGIN_S = 20.0
"""For the end of the nodes' clean-up and the report, after the drain and run.stop_timeout_s."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc stop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="do not wait for rollouts that are under way")
    how.add_argument("--drain", type=float, metavar="SECONDS", help="how long they may take (default: run.drain_s)")
    args = parser.parse_args(argv)
    if args.drain is not None and args.drain < 0:
        raise ConfigError(f"--drain {args.drain:g}: give seconds, 0 or more")
    return stop_run(chosen_run(args.run), drain_s=0.0 if args.now else args.drain)


def stop_run(run: RunDirectory, *, drain_s: float | None = None, verb: str = "stop") -> int:
    """Stop it and say so; ``drain_s``: None: as the run's own settings say. Exit code 1 if it has not ended in time."""
    state = run_state(run)
    if state.word == UNKNOWN:
        raise RunError(f"it is not known whether {run.run_id} runs: {state.detail}")
    if not state.living or state.job is None:
        did = "has never been submitted" if state.word == NOT_SUBMITTED else f"does not run: it is {state.word}"
        print(f"{run.run_id} {did}")
        return 0
    settings = run.load_config().run
    drain_s = settings.drain_s if drain_s is None else drain_s
    order = StopOrder(Ending.STOPPED, f"prorl-hpc {verb}", drain_s)
    print(f"stopping {run.run_id} ({state.word}, {state.job.description})", flush=True)
    try:
        gone = Stopping(run, state.job, order).wait(drain_s + settings.stop_timeout_s + MARGIN_S)
    except KeyboardInterrupt:
        print(f"it goes on stopping: `prorl-hpc status {run.path}` tells when it is gone; `--now` hurries it")
        return 130
    if not gone:
        print(
            f"{state.job.description} is still ending: `prorl-hpc status {run.path}` tells when it is gone",
            file=sys.stderr,
        )
        return 1
    print(f"{_how_it_ended(run)}; go on with: prorl-hpc resume {run.path}")
    return 0


def _how_it_ended(run: RunDirectory) -> str:
    """Training may have been finished, or have failed, while it was told to stop."""
    state = run_state(run)
    return f"{state.word} ({state.detail})" if state.detail else state.word
