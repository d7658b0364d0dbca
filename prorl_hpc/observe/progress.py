"""Shows a person a running run: a live display on a terminal, plain lines elsewhere.

Only reads ``state/*.json`` and ``metrics.jsonl``, so it works from any node that sees the run directory
and can be left and started again at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.display import render
from prorl_hpc.observe.plain_lines import PlainLines
from prorl_hpc.observe.snapshot import SnapshotReader


def follow(
    run: RunDirectory, job_alive: Callable[[], bool], poll_s: float = 0.5, *, console: Console | None = None
) -> None:
    """Show the run until ``job_alive()`` is false, or training is finished and all processes have ended.

    Missing and half-written files are waited for, never an error.
    """
    console = console or Console()
    if console.is_terminal:
        _follow_live(run, job_alive, poll_s, console)
    else:
        _follow_plain(run, job_alive, poll_s, console)


def _follow_live(run: RunDirectory, job_alive: Callable[[], bool], poll_s: float, console: Console) -> None:
    reader, started = SnapshotReader(run), time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            alive = job_alive()  # asked before reading, so that the last look sees everything
            snapshot = reader.read()
            live.update(render(run.run_id, snapshot, time.monotonic() - started), refresh=True)
            if not alive or snapshot.over:
                return
            time.sleep(poll_s)


def _follow_plain(run: RunDirectory, job_alive: Callable[[], bool], poll_s: float, console: Console) -> None:
    reader, lines = SnapshotReader(run), PlainLines(time.monotonic())
    while True:
        alive = job_alive()
        snapshot = reader.read()
        for line in lines.update(snapshot, time.monotonic()):
            console.out(line, highlight=False)
            console.file.flush()
        if not alive or snapshot.over:
            return
        time.sleep(poll_s)
