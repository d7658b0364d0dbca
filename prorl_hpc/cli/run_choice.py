"""Which run a verb is about: a directory, a run's id or the end of it, the id of its Slurm job, or the newest one."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.run_index import all_runs

LATEST = Path("runs") / "latest"
NEWEST = "latest"
_SHOWN = 5
_LONGEST_SHOWN = 80


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="directory, run id (demo-1a2b3c, or 1a2b3c), name where only one has it, Slurm job id, or latest (default: the newest run)",
    )


def chosen_run(given: str | None, *, to_read: bool = False) -> RunDirectory:
    """The one run that is meant. Raises RunDirectoryError with the nearest names; also for a run that is not this user's
    alone, unless it is only ``to_read``."""
    try:
        return RunDirectory.open(_meant(given).path, to_read=to_read)
    except OSError as error:  # its name is too long, or its storage does not answer
        shown = given if given is None or len(given) < _LONGEST_SHOWN else f"{given[:_LONGEST_SHOWN]}…"
        raise RunDirectoryError(f"{shown or LATEST} is no run that can be read: {error.strerror}") from error


def _meant(given: str | None) -> RunDirectory:
    if given is None:
        return _newest()
    if not given.strip():
        raise RunDirectoryError(
            "the run that was named is empty, as a shell variable is that was not set: give a directory, run id or job id"
        )
    path = Path(given)
    if (path / "config.yaml").is_file():
        return RunDirectory(path.resolve())
    if given == NEWEST:
        return _newest()
    if "/" not in given and given not in (".", ".."):
        if found := _named(given):
            return _only(given, found)
        if not path.exists():
            raise RunDirectoryError(
                f"there is no run {given}: no directory, run id or job id is called that. {_near(given)}"
            )
    if not path.exists():
        raise RunDirectoryError(f"{path.absolute()} is not there: give a run's directory or id. {_near(given)}")
    return RunDirectory(path.resolve())  # opening it says what it lacks


def known_runs() -> list[RunDirectory]:
    """Those of the index, newest first, then those under ``runs`` here that it lacks."""
    indexed = all_runs()
    have = {run.path.resolve() for run in indexed}
    here = sorted(Path("runs").resolve().glob("*/*/config.yaml"), reverse=True)
    return [*indexed, *(RunDirectory(file.parent) for file in here if file.parent not in have)]


def link_latest(run: RunDirectory, root: Path) -> None:
    """Point ``<root>/latest`` at ``run``; replaced in one step, so that it never dangles."""
    link, aside = root / "latest", root / f".latest-{run.run_id}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(run.path, root))
    aside.replace(link)


def _only(given: str, found: list[RunDirectory]) -> RunDirectory:
    if len(found) == 1:
        return found[0]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    if len({run.run_id for run in found}) == len(found):
        names = ", ".join(run.run_id for run in found[:_SHOWN])
        raise RunDirectoryError(
            f"{given} is the name of {len(found)} runs: give the id of one, newest first: {names}{more}"
        )
    places = ", ".join(str(run.path) for run in found[:_SHOWN])
    raise RunDirectoryError(f"{given} is more than one run: give one of their directories, {places}{more}")


def _newest() -> RunDirectory:
    if LATEST.exists():
        return RunDirectory(LATEST.resolve())
    newest = next(iter(all_runs()), None)
    if newest is None:
        raise RunDirectoryError(
            f"no run was named, there is no {LATEST} here, and the index of your runs is empty: give the run's "
            "directory, or start one with `prorl-hpc launch`"
        )
    return newest


def _named(given: str) -> list[RunDirectory]:
    runs = known_runs()
    by_id = [run for run in runs if run.run_id == given]
    if by_id:
        return by_id
    tails = [run for run in runs if re.fullmatch(r"[0-9a-f]{6}", given) and run.run_id.endswith(f"-{given}")]
    leader = given.split("+")[0]
    # the ids of jobs come again after years, those of processes sooner: the newest run is meant
    carried = [run for run in runs if leader in job_ids(run)][:1] if leader.isdigit() and not tails else []
    return tails or carried or [run for run in runs if run.run_id.rpartition("-")[0] == given]


def job_ids(run: RunDirectory) -> tuple[str, ...]:
    """Of its newest job; none if it has none, or its record is damaged."""
    try:
        job = Job.open(run)
    except RunError:
        return ()
    return job.ids if job is not None else ()


def _near(given: str) -> str:
    names = [run.run_id for run in known_runs()]
    near = difflib.get_close_matches(Path(given).name, names, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if not names:
        return "The index of your runs is empty"
    more = f" and {len(names) - _SHOWN} more (`prorl-hpc status --all`)" if len(names) > _SHOWN else ""
    return f"Your runs, newest first: {', '.join(names[:_SHOWN])}{more}"
