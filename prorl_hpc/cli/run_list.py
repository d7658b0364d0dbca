"""All runs of the user in one table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from prorl_hpc.cli.run_rows import RunRow, differing, since_submission
from prorl_hpc.observe.wording import clock, number
from prorl_hpc.slurm.run_states import (
    DRAINING,
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    SUSPENDED,
    UNKNOWN,
    WAITING,
)

STYLE = {
    WAITING: "yellow",
    RUNNING: "bold green",
    DRAINING: "yellow",
    SUSPENDED: "yellow",
    FINISHED: "green",
    FAILED: "bold red",
    STOPPED: "",
    ENDED: "red",
    UNKNOWN: "magenta",
}


_WIDEST = 48


def run_table(rows: Sequence[RunRow]) -> RenderableType:
    """One line a run, at least one; the last columns may be cut at the terminal's edge. What sets runs of one name apart
    is shown where anything does."""
    names = ("run", "state", "job", "attempt", "step", "reward", "age", "left")
    lines = [_cells(row) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for place, name in enumerate(names):
        table.add_column(name, no_wrap=True, min_width=max(len(name), *(len(line[place]) for line in lines)))
    settings = [" ".join(words) for words in differing(rows)]
    if any(settings):
        widest = min(_WIDEST, max(map(len, settings)))
        table.add_column("with", overflow="ellipsis", no_wrap=True, min_width=widest, max_width=_WIDEST)
        lines = [[*line[:-1], Text(words), line[-1]] for line, words in zip(lines, settings, strict=True)]
    table.add_column("what", overflow="ellipsis", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _cells(row: RunRow) -> list[Text]:
    state = row.state
    left = state.report.left_s if state.living and state.report is not None else None
    return [
        Text(row.run.run_id),
        Text(state.word, style=STYLE.get(state.word, "")),
        Text(_job(row)),
        Text(str(state.attempt)),
        Text(_step(row)),
        Text(number(row.reward)),
        Text(since_submission(state)),
        Text(clock(left) if left is not None else ""),
        Text(state.detail.splitlines()[0] if state.detail else ""),
    ]


def _job(row: RunRow) -> str:
    if row.state.job is None:
        return "–"
    record = row.state.job.record
    return record.job_id if record.kind == "slurm" else record.enclosing or f"here:{record.job_id}"


def _step(row: RunRow) -> str:
    if row.step is None:
        return "–"
    return f"{row.step}/{row.steps}" if row.steps is not None else str(row.step)
