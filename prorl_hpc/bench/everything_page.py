"""The page of ``bench all``: a head that says where, when and from what, and the table of every bench."""

from __future__ import annotations

import shutil
from pathlib import Path

from prorl_hpc.bench.document import check_place, read_between, write_between
from prorl_hpc.bench.everything import Everything

HEAD = "all"
SCALING = "scaling"
PICTURES = {"plots/scaling.png": "scaling-nodes.png"}
"""Of a series → beside the page, for whoever shows them."""


def check_page(path: Path, names: list[str]) -> None:
    """ConfigError unless ``path`` has a place for the head and for each bench."""
    for name in (HEAD, *names):
        check_place(path, name)


def write_page(path: Path, found: Everything, *, quick: bool) -> None:
    """The machine, the commit and the date stand in the head alone. ``quick``: so do all tables, and those of the benches
    stay as their whole sizes left them."""
    if quick:
        tables = [f"### {outcome.name}, quick\n\n{outcome.report.table()}" for outcome in found.outcomes]
        write_between(path, HEAD, "\n\n".join([head(found), *tables]))
        return
    write_between(path, HEAD, head(found))
    for outcome in found.outcomes:
        write_between(path, outcome.name, outcome.report.table())


def copy_pictures(series: Path, page: Path, *, quick: bool) -> list[Path]:
    """Those that ``bench scaling`` has drawn; where they are now. As with figures, a whole series goes before a ``quick`` one."""
    if quick and read_between(page, SCALING):
        return []
    drawn = [(series / source, page.parent / name) for source, name in PICTURES.items() if (series / source).is_file()]
    for source, target in drawn:
        shutil.copyfile(source, target)
    return [target for _, target in drawn]


def head(found: Everything) -> str:
    lines = [
        f"`{found.command}`: {found.seconds / 60:.0f} minutes on {found.machine}; commit {found.commit or 'unknown'}; {found.date}.",
        "",
        "| bench | command | figures | hold | s | load before |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in found.outcomes:
        figures = len(outcome.report.figures)
        lines.append(
            f"| [{outcome.name}](#bench-{outcome.name}) | `{outcome.command}` | {figures} | {outcome.held} "
            f"| {outcome.seconds:.0f} | {outcome.report.machine.load:g} |"
        )
    return "\n".join(lines)
