"""``prorl-hpc stop [RUN] [--now] [--drain SECONDS]``: end a run in order. ``resume`` goes on with it.

No rollout is started any more, those under way may end for run.drain_s, and the trainer saves a checkpoint at once; what
was finished is recorded. A run that waits in the queue, for the first time or between two attempts, is cancelled for good.
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.cli.stopping import Stopping
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.endings import Ending, StopOrder, read_node_end
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.run_states import NOT_SUBMITTED, UNKNOWN, run_state
from prorl_hpc.slurm.steps import PlacedNode

MAX_DRAIN_S = 30 * 86400.0
MARGIN_S = 20.0
"""For the end of the nodes' clean-up and the report, after the drain and run.stop_timeout_s."""
HELD = ("SUSPENDED", "STOPPED")
"""States of a job whose processes stand still: ``scontrol suspend`` or gang scheduling, SIGSTOP."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc stop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="do not wait for rollouts that are under way")
    how.add_argument("--drain", type=float, metavar="SECONDS", help="how long they may take (default: run.drain_s)")
    args = parser.parse_args(argv)
    if args.drain is not None and not 0 <= args.drain <= MAX_DRAIN_S:
        raise ConfigError(f"--drain {args.drain:g}: give seconds, from 0 to {MAX_DRAIN_S:.0f} (30 days)")
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
    if state.job_state in HELD:
        print(_held(state.job, state.job_state), flush=True)
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
    for line in what_stays(run, settings.runtime_root):
        print(line, file=sys.stderr)
    return 0


def _held(job: Job, state: str) -> str:
    return (
        f"{job.description} is {state}: its processes stand still and see no order. Unless it is let go on meanwhile "
        f"(`scontrol resume {job.record.job_id}`), Slurm kills them when the time to end is over: no checkpoint is saved"
    )


def what_stays(run: RunDirectory, runtime_root: str) -> list[str]:
    """For people: what the newest attempt's nodes said that they could not remove, and which of them were killed before
    they could remove or say anything."""
    newest = RunDirectory(run.path, run.newest_attempt)
    try:
        placed = read_json(newest.placement_file, list[PlacedNode]) or []
        ends = {node.rank: read_node_end(newest, node.rank) for node in placed}
    except (OSError, msgspec.MsgspecError) as error:
        return [f"whether something stays on the run's nodes is not known: {error}"]
    left = [f"left on {end.node}: {'; '.join(end.left)}" for end in ends.values() if end is not None and end.left]
    silent = sorted({node.host for node in placed if ends[node.rank] is None})
    if silent:
        left.append(
            f"the processes on {', '.join(silent)} were killed before they could remove their files: "
            f"{runtime_root}/prorl-{os.getuid()}-* may still be there. `prorl-hpc clean`, run there, removes what is dead"
        )
    return left


def _how_it_ended(run: RunDirectory) -> str:
    """Training may have been finished, or have failed, while it was told to stop."""
    state = run_state(run)
    return f"{state.word} ({state.detail})" if state.detail else state.word
