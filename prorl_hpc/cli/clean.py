"""``prorl-hpc clean [RUN] [--yes] [--dry-run]``: remove what dead runs left on this machine, or an ended run for good.

Without RUN: runtime directories, shared memory and index entries of runs that are dead; nothing of a run that lives, and
nothing of which that is not sure. With RUN: that run's whole directory, checkpoints included, after a question.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run, known_runs
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError, filled_in
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.leftovers import Leftover, find_leftovers, remove
from prorl_hpc.slurm.run_index import forget_run, read_index
from prorl_hpc.slurm.run_states import UNKNOWN, RunState, run_state, run_states


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc clean", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--root", action="append", type=Path, default=[], metavar="DIR", help="more places of runtime directories"
    )
    args = parser.parse_args(argv)
    if args.run is not None:
        return delete_run(chosen_run(args.run), yes=args.yes, dry_run=args.dry_run)
    return clean_machine(args.root, dry_run=args.dry_run)


def clean_machine(more_roots: list[Path], *, dry_run: bool) -> int:
    """Exit code 1 if something dead could not be removed."""
    runs = known_runs()
    living = [run.run_id for run, state in zip(runs, run_states(runs), strict=True) if state.living]
    found = find_leftovers([*runtime_roots(runs), *more_roots], living)
    left: list[str] = []
    for item in (item for item in found if item.dead):
        print(f"{'would remove' if dry_run else 'removing'} {_named(item)}: {item.why}")
        left += [] if dry_run else remove(item)
    for item in (item for item in found if not item.dead):
        print(f"keeping {_named(item)}: {item.why}")
    dropped = [] if dry_run else read_index()[1]
    if dropped:
        print(f"dropped {len(dropped)} entries of the index whose directories are gone")
    if not found and not dropped:
        print("dead runs have left nothing on this machine")
    for path in left:
        print(f"could not be removed: {path}", file=sys.stderr)
    return 1 if left else 0


def runtime_roots(runs: list[RunDirectory]) -> list[Path]:
    """Where runtime directories of ``runs`` can be on this machine, and of runs with the usual settings."""
    roots = [Path("/tmp"), Path(tempfile.gettempdir())]
    for setting in sorted({_runtime_root(run) for run in runs} - {""}):
        try:
            roots.append(filled_in(setting))
        except RunDirectoryError:  # it names a variable of a job, which is not set here
            continue
    return list(dict.fromkeys(roots))


def delete_run(run: RunDirectory, *, yes: bool, dry_run: bool) -> int:
    """Delete an ended run's directory, its place in the index and a ``latest`` that links to it. Raises RunError while
    it lives, ConfigError if it is not a whole run directory of this user."""
    _check_whole(run)
    state = _ended_state(run)
    what = f"{run.path} ({state.word}, {_size_gib(run.path):.2f} GiB, {_checkpoints(run)} checkpoints)"
    if dry_run:
        print(f"would delete {what}")
        return 0
    if not yes and not _agreed(f"delete {what} for good? [y/N] "):
        print("nothing was deleted")
        return 1
    with run.lock("clean"):
        _ended_state(run)  # it may have been resumed while its owner thought
        aside = run.path.with_name(f"deleted-{run.run_id}")  # NFS keeps a directory in which the lock is open
        run.path.rename(aside)
    forget_run(run)
    shutil.rmtree(aside)
    for link in {run.path.parents[1] / "latest", Path("runs") / "latest"}:
        if link.is_symlink() and not link.exists() and link.readlink().name == run.path.name:
            link.unlink()
    print(f"deleted {run.path}")
    return 0


def _check_whole(run: RunDirectory) -> None:
    """Any directory may have a config.yaml: what is deleted must be what launch made."""
    run.check_ours()
    parts = (run.attempts, run.jobs, run.keys, run.rollouts, run.checkpoints)
    lacking = [part.name for part in parts if part.is_symlink() or not part.is_dir()]
    lacking += [] if run.plan_file.is_file() else [run.plan_file.name]
    if lacking:
        raise ConfigError(
            f"{run.path} is not deleted: a run directory that `prorl-hpc launch` made has {', '.join(lacking)}. If it is "
            "what is left of one, delete it yourself"
        )


def _ended_state(run: RunDirectory) -> RunState:
    state = run_state(run)
    if state.word == UNKNOWN:
        raise RunError(f"it is not known whether {run.run_id} lives, so it stays: {state.detail}")
    if state.living:
        told = state.detail or state.job_state
        raise RunError(f"{run.run_id} is {state.word} ({told}): end it first with `prorl-hpc stop {run.path}`")
    return state


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("clean RUN asks before it deletes, and here is no terminal to ask on: give --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _named(item: Leftover) -> str:
    return f"{item.path}" + (f" of {item.run_id}" if item.run_id else "")


def _runtime_root(run: RunDirectory) -> str:
    """run.runtime_root of its config as it is stored, which need not be one of this version."""
    import msgspec

    try:
        stored = msgspec.yaml.decode(run.config_file.read_bytes(), type=dict[str, dict[str, Any]])
    except (OSError, msgspec.MsgspecError):
        return ""
    return str(stored.get("run", {}).get("runtime_root", ""))


def _size_gib(path: Path) -> float:
    sizes = (file.lstat().st_size for file in path.rglob("*"))
    return float(sum(sizes)) / 2**30


def _checkpoints(run: RunDirectory) -> int:
    return sum(path.is_dir() for path in run.checkpoints.iterdir()) if run.checkpoints.is_dir() else 0
