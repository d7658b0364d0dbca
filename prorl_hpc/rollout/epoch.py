"""The run's epoch: which recorded rollouts count.

A token in the run directory, the same for all attempts: orders stay open over them. ``resume --fresh`` makes a new one.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory


def epoch_token(run: RunDirectory) -> str:
    """The token of the run's epoch, made here if there is none yet. Raises OSError."""
    if not run.epoch_file.exists():
        aside = _written_aside(run)
        try:
            run.epoch_file.hardlink_to(aside)  # unlike a rename, a link never replaces
        except FileExistsError:
            pass  # somebody was faster
        finally:
            aside.unlink()
    return run.epoch_file.read_text().strip()


def begin_new_epoch(run: RunDirectory) -> None:
    """From the next start of the coordinator on nothing that was recorded counts: open orders are closed and all ids are
    free again; trajectories of finished rollouts stay in ``rollouts/``. Only while no attempt runs. Raises OSError."""
    _written_aside(run).replace(run.epoch_file)


def _written_aside(run: RunDirectory) -> Path:
    fd, name = tempfile.mkstemp(dir=run.path, prefix=".epoch-")
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(16) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
