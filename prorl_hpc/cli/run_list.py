"""All runs of the user in one table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from prorl_hpc.cli.run_rows import RunRow, since_submission
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


def run_table(rows: Sequence[RunRow]) -> RenderableType:
    """One line a run; the last column may be cut at the terminal's edge."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for column in ("run", "state", "job", "attempt", "step", "reward", "age", "left"):
        table.add_column(column, no_wrap=True)
    table.add_column("what", overflow="ellipsis", no_wrap=True)
    for row in rows:
        state = row.state
        left = clock(state.report.left_s) if state.living and state.report and state.report.left_s is not None else ""
        cells = [
            Text(row.run.run_id),
            Text(state.word, style=STYLE.get(state.word, "")),
            Text(_job(row)),
            Text(str(state.attempt)),
            Text(_step(row)),
            Text(number(row.reward)),
            Text(since_submission(state)),
            Text(left),
            Text(state.detail.splitlines()[0] if state.detail else ""),
        ]
        table.add_row(*cells)
    return table


def _job(row: RunRow) -> str:
    if row.state.job is None:
        return "–"
    record = row.state.job.record
    return record.job_id if record.kind == "slurm" else f"here:{record.job_id}"


def _step(row: RunRow) -> str:
    if row.step is None:
        return "–"
    return f"{row.step}/{row.steps}" if row.steps is not None else str(row.step)
