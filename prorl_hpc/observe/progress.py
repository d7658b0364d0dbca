"""Shows a person a running run: a live display on a terminal, plain lines elsewhere.

Only reads ``state/*.json`` and ``metrics.jsonl``, so it works from any node that sees the run directory
and can be left and started again at any time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.display import render
from prorl_hpc.observe.plain_lines import PlainLines
from prorl_hpc.observe.snapshot import Snapshot, SnapshotReader


def follow(
    run: RunDirectory,
    job_alive: Callable[[], bool],
    poll_s: float = 0.5,
    *,
    waits_for: Callable[[], str] = str,
    console: Console | None = None,
) -> None:
    """Show the run until ``job_alive()`` is false, or training is finished and all processes have ended.

    ``waits_for``: why the job waits in a queue, for people; empty while it does not. Missing and half-written files are
    waited for, never an error.
    """
    console = console or Console()
    reader = SnapshotReader(run)

    def look() -> tuple[bool, Snapshot]:
        alive = job_alive()  # asked before reading, so that the last look sees everything
        return alive, dataclasses.replace(reader.read(), waits_for=waits_for() if alive else "")

    if console.is_terminal:
        _follow_live(run.run_id, look, poll_s, console)
    else:
        _follow_plain(look, poll_s, console)


def _follow_live(run_id: str, look: Callable[[], tuple[bool, Snapshot]], poll_s: float, console: Console) -> None:
    started = time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            alive, snapshot = look()
            live.update(render(run_id, snapshot, time.monotonic() - started), refresh=True)
            if not alive or snapshot.over:
                return
            time.sleep(poll_s)


def _follow_plain(look: Callable[[], tuple[bool, Snapshot]], poll_s: float, console: Console) -> None:
    lines = PlainLines(time.monotonic())
    while True:
        alive, snapshot = look()
        for line in lines.update(snapshot, time.monotonic()):
            console.out(line, highlight=False)
            console.file.flush()
        if not alive or snapshot.over:
            return
        time.sleep(poll_s)
