"""Writes a report into a Markdown file, between the marks of its bench: what else the file says stays."""

from __future__ import annotations

import os
from pathlib import Path

from prorl_hpc.bench.figures import Report
from prorl_hpc.messages.errors import ConfigError


def check_place(path: Path, bench: str) -> None:
    """ConfigError unless a report of ``bench`` can be written into ``path``: before anything is measured."""
    _parted(path, bench)
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{path} cannot be written")


def write_into(path: Path, bench: str, report: Report) -> None:
    """ConfigError if the file has no marks for ``bench``."""
    write_between(path, bench, report.markdown())


def write_between(path: Path, bench: str, text: str) -> None:
    """``<!-- bench NAME -->`` and ``<!-- end -->`` are the marks. ConfigError if the file has none for ``bench``."""
    before, _, after = _parted(path, bench)
    path.write_text(f"{before}{text}\n{after}", encoding="utf-8")


def read_between(path: Path, bench: str) -> str:
    """What stands between the marks now. ConfigError if the file has none for ``bench``."""
    return _parted(path, bench)[1].strip()


def _parted(path: Path, bench: str) -> tuple[str, str, str]:
    """What the file says before the figures, there and after them; the marks belong to the outer two."""
    begin, end = f"<!-- bench {bench} -->\n", "<!-- end -->"
    marks = f"a line {begin.strip()!r} and a line {end!r} say where the figures go"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path} to write into: make it first; {marks}") from None
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{path} cannot be read ({why}): name a text file in which {marks}") from error
    before, found, rest = text.partition(begin)
    said, closed, after = rest.partition(end)
    if not found or not closed:
        raise ConfigError(f"{path} has no place for these figures: {marks}")
    return f"{before}{begin}", said, f"{end}{after}"
