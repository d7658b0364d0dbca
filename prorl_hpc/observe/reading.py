"""Files of a run that is looked at while it writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from prorl_hpc.messages.codec import read_json

T = TypeVar("T")


def read_tolerantly(path: Path, type_: type[T]) -> T | None:
    """The file as ``type_``; None if it is missing, unreadable or not (yet) of that type."""
    try:
        return read_json(path, type_)
    except (OSError, msgspec.MsgspecError):
        return None
