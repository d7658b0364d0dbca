"""Marks in ``state/`` that end an attempt: whoever makes one first is right, and it is there whole or not at all.

On a full disk a mark without content is made: that it is there matters more than what it says.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def make_mark(mark: Path, content: object) -> bool:
    """Make ``mark``, holding ``content`` as JSON, unless it is there; True if it was made. Raises OSError."""
    fd, aside = tempfile.mkstemp(dir=mark.parent, prefix=f".{mark.name}.")
    try:
        _fill(fd, msgspec.json.encode(content))
        mark.hardlink_to(aside)  # unlike a rename, a link never replaces
        return True
    except FileExistsError:
        return False
    finally:
        Path(aside).unlink(missing_ok=True)


def _fill(fd: int, content: bytes) -> None:
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            try:
                written = file.write(content)
            except OSError:
                written = 0
            if written != len(content):
                file.truncate(0)
    except OSError:  # some file systems tell only at the close; readers take what does not decode for no content
        return


def read_mark(mark: Path, type_: type[T]) -> T | str | None:
    """What a mark holds; its text, perhaps empty, if that is not ``type_``: it was made on a full disk, or by hand. None
    if there is no mark."""
    try:
        content = mark.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=type_)
    except msgspec.MsgspecError:
        return content.decode(errors="replace").strip()
