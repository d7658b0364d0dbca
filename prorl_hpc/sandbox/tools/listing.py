"""What a directory holds, for people and language models."""

from __future__ import annotations

import itertools
import os

from prorl_hpc.sandbox.tools.workspace import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LEVELS = 2
ENTRIES = 2000
"""Entries of one directory that are read at most."""


def list_directory(fd: int, path: str, room: int) -> str:
    """The entries below the directory ``fd`` (closed here), two levels deep, without hidden ones, in ``room`` bytes."""
    lines: list[str] = []
    hidden = 0
    for line, is_hidden in _entries(fd, "", LEVELS):
        hidden += is_hidden
        if is_hidden:
            continue
        room -= len(line.encode()) + 1
        if room < 0:
            lines.append("[... cut here: there is more; view a directory below]")
            break
        lines.append(line)
    left_out = f"; {hidden} hidden entries are left out" if hidden else ""
    return "\n".join([f"{shown(path)}, {LEVELS} levels deep{left_out}:", *(lines or ["(nothing)"])]) + "\n"


def _entries(fd: int, above: str, levels: int) -> Iterator[tuple[str, bool]]:
    """(line, whether it is hidden), in order; follows no link."""
    try:
        with os.scandir(fd) as found:
            entries = sorted(itertools.islice(found, ENTRIES), key=lambda entry: entry.name)
            more = next(found, None) is not None
        for entry in entries:
            name = above + plain(entry.name)
            if entry.name.startswith("."):
                yield name, True
            elif entry.is_symlink():
                yield f"{name} -> {plain(os.readlink(entry.name, dir_fd=fd))}", False
            elif entry.is_dir(follow_symlinks=False):
                yield f"{name}/", False
                if levels > 1:
                    yield from _below(fd, entry.name, f"{name}/", levels - 1)
            else:
                yield name, False
        if more:
            yield f"{above}[... more than {ENTRIES} entries]", False
    finally:
        os.close(fd)


def _below(fd: int, name: str, above: str, levels: int) -> Iterator[tuple[str, bool]]:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError as error:
        yield f"{above} [{error.strerror}]", False
    else:
        yield from _entries(inner, above, levels)


def plain(name: str) -> str:
    """A file name on one line: what is not text or would break the line is escaped."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
