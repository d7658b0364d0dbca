"""Removing what has one of our names, whatever it is: people move directories elsewhere and leave a link."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)


def discard(path: Path) -> None:
    """A directory with what is in it, a file; of a link the link alone. Nothing, if nothing is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_away(path: Path) -> None:
    """``discard`` what nobody needs; if that is refused, it is told and left."""
    try:
        discard(path)
    except OSError as error:
        log.warning("%s is no longer needed, and cannot be removed: %s", path, error)
