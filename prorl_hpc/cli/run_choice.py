"""Which run a verb is about: a directory that was given, else ``runs/latest``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError

LATEST = Path("runs") / "latest"


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help=f"the run's directory (default: {LATEST})")


def chosen_run(given: str | None) -> RunDirectory:
    """Raises RunDirectoryError if it is not a run directory."""
    if given is None and not LATEST.exists():
        raise RunDirectoryError(f"no run was named, and there is no {LATEST} here: give the run's directory")
    return RunDirectory.open(Path(given or LATEST).resolve())


def link_latest(run: RunDirectory, root: Path) -> None:
    """Point ``<root>/latest`` at ``run``; replaced in one step, so that it never dangles."""
    link, aside = root / "latest", root / f".latest-{run.run_id}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(run.path, root))
    aside.replace(link)
