"""What a folder's disk refuses, as a sentence for whoever named the folder."""

from __future__ import annotations

import argparse
import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.messages.errors import ConfigError, RunError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""The folder is right, its disk is not."""


@contextlib.contextmanager
def told(named: str) -> Iterator[None]:
    """OSError as RunError where the disk is full or broken, else as ConfigError. ``named``: what the folder was given as,
    such as ``out=DIR``."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what we print
        raise
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.errno in _DISK:
            raise RunError(
                f"{named} cannot be written ({what}): make room there, or name a folder elsewhere"
            ) from error
        raise ConfigError(f"{named} cannot be used ({what}): name a folder that you may write") from error


def given_path(text: str) -> Path:
    """The type of an argument: an empty one, as from a variable that is not set, is not this directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a path")
    return Path(text)
