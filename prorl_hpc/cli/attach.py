"""``prorl-hpc attach [RUN] [NODE|PROCESS] [--command 'COMMAND']``: a shell on a node of a run that runs.

NODE is a host, PROCESS one of the run's (worker-0), or give a component or a number in the plan; default: the first node.
The shell begins in the node's runtime directory and knows PRORL_RUN_DIR, PRORL_RUN_ID, PRORL_ATTEMPT, PRORL_NODE_RANK and
PRORL_RUNTIME_DIR. On Slurm it is a step of the job, which shares the resources of the others and ends with the job.
"""

from __future__ import annotations

import argparse
import os
import sys

from prorl_hpc.cli.run_choice import chosen_run
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.attaching import attach_words, chosen_node, outer_environment
from prorl_hpc.slurm.run_states import DRAINING, RUNNING, run_state


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc attach", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run (default: the newest)")
    parser.add_argument("node", nargs="?", metavar="NODE|PROCESS", help="where (default: the first node)")
    parser.add_argument("-c", "--command", metavar="COMMAND", help="run this there, without a terminal, and come back")
    args = parser.parse_args(argv)
    run, target = _chosen(args.run, args.node)
    state = run_state(run)
    if state.word not in (RUNNING, DRAINING):
        told = f" ({state.detail})" if state.detail else ""
        raise RunError(f"{run.run_id} is {state.word}{told}: it has no nodes to attach to")
    run = RunDirectory(as_launched(run).path, run.newest_attempt)
    node = chosen_node(run, target)
    if args.command is None and not sys.stdin.isatty():
        raise ConfigError("attach opens a shell, and standard input is no terminal: give --command 'COMMAND'")
    words = attach_words(run, node, args.command)
    if args.command is None:
        print(f"attempt {run.attempt} of {run.run_id}, node {node.rank} ({node.component}) on {node.host}", flush=True)
    try:
        os.execvpe(words[0], words, outer_environment(os.environ))
    except OSError as error:
        raise RunError(f"{words[0]} cannot be started: {error.strerror}") from error


def _chosen(given: str | None, target: str | None) -> tuple[RunDirectory, str | None]:
    """A single word may be a run, or a node of the newest one."""
    if given is None or target is not None:
        return chosen_run(given), target
    try:
        return chosen_run(given), None
    except RunDirectoryError as error:
        if "/" in given:
            raise
        run = chosen_run(None)
        try:
            chosen_node(run, given)
        except (ConfigError, RunError):
            raise error from None
        return run, given


def as_launched(run: RunDirectory) -> RunDirectory:
    """``run`` by the path that its own processes know it by: their runtime directories are named after that."""
    known = RunDirectory(f"{run.load_config().run.root}/{run.path.parent.name}/{run.run_id}")
    return known if known.path.exists() and known.path.samefile(run.path) else run
