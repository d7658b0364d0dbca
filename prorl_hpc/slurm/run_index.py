"""The index of this user's runs: ``<prorl_home>/runs/<run id>`` is a link to the run's directory, wherever that is.

``launch`` makes the link. An entry whose directory is gone is dropped when the index is read; where a whole storage is
missing (not mounted on this machine), it is only left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.config.run_directory import RunDirectory


def index_dir() -> Path:
    return prorl_home() / "runs"


def register_run(run: RunDirectory) -> None:
    """Enter ``run``; again does nothing."""
    directory = index_dir()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for name in _names(run.run_id):
        try:
            (directory / name).symlink_to(run.path)
            return
        except FileExistsError:
            target = (directory / name).readlink()
            if target == run.path:
                return
            if not target.exists():
                _replace(directory / name, run.path)
                return


def forget_run(run: RunDirectory) -> None:
    """Take ``run`` out of the index."""
    for entry in _entries():
        if entry.readlink().resolve() == run.path.resolve():
            entry.unlink(missing_ok=True)


def all_runs() -> list[RunDirectory]:
    """The runs whose directories are there, newest first (by their launch)."""
    return read_index()[0]


def read_index() -> tuple[list[RunDirectory], list[Path]]:
    """The runs, newest first, and the entries that were dropped because their directory is gone."""
    found: list[tuple[float, str, RunDirectory]] = []
    dropped = []
    for entry in _entries():
        try:
            run, entered = RunDirectory(entry.readlink()), entry.lstat().st_mtime
            if run.config_file.is_file():
                found.append((entered, run.run_id, run))
            elif _gone(run):
                entry.unlink(missing_ok=True)
                dropped.append(entry)
        except OSError:  # another process dropped it, or the storage does not answer
            continue
    return [run for *_, run in sorted(found, key=lambda item: item[:2], reverse=True)], dropped


def _entries() -> list[Path]:
    try:
        return [entry for entry in index_dir().iterdir() if entry.is_symlink() and not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


def _gone(run: RunDirectory) -> bool:
    """runs/<date>/<id> is not there, though the directory that holds ``runs`` is."""
    return not run.path.exists() and run.path.parents[min(2, len(run.path.parents) - 1)].is_dir()


def _names(run_id: str) -> Iterator[str]:
    """Ids are random but short: two roots may have the same one."""
    yield run_id
    number = 2
    while True:
        yield f"{run_id}.{number}"
        number += 1


def _replace(entry: Path, target: Path) -> None:
    aside = entry.with_name(f".{entry.name}.{os.getpid()}")
    aside.symlink_to(target)
    aside.replace(entry)
