"""Writes a report into a Markdown file, between the marks of its bench: what else the file says stays."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.bench.figures import Report
from prorl_hpc.messages.errors import ConfigError


def write_into(path: Path, bench: str, report: Report) -> None:
    """``<!-- bench NAME -->`` and ``<!-- end -->`` are the marks. ConfigError if the file has none for ``bench``."""
    begin, end = f"<!-- bench {bench} -->\n", "<!-- end -->"
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ConfigError(
            f"{path} has no place for these figures: write the lines {begin.strip()!r} and {end!r} into it"
        )
    path.write_text(f"{before}{begin}{report.markdown()}\n{end}{after}", encoding="utf-8")
