"""``prorl-hpc top [RUN]``: a run live in the terminal: stages, servers, throughput, reward, attempt, time left.

q or Ctrl-C leaves the view and nothing else. Where standard output is no terminal, one frame is printed as plain text.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

from rich.console import Console, Group, RenderableType
from rich.text import Text

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.cli.run_detail import elapsed_s, readable_failure, state_line
from prorl_hpc.cli.terminal_keys import TerminalKeys
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.observe.display import render
from prorl_hpc.observe.snapshot import Snapshot, SnapshotReader
from prorl_hpc.observe.wording import count
from prorl_hpc.slurm.run_states import SUSPENDED, WAITING, run_state

MIN_EVERY_S, MAX_EVERY_S = 0.1, 3600.0
STATE_EVERY_S = 5.0
"""How often the controller is asked; the run's files are read at each frame."""
_LEAVE = ("q", "Q", "\x1b", "\x04")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc top", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two frames (1)")
    args = parser.parse_args(argv)
    if not MIN_EVERY_S <= args.every <= MAX_EVERY_S:
        raise ConfigError(f"--every {args.every:g}: give seconds from {MIN_EVERY_S:g} to {MAX_EVERY_S:g}")
    console = Console()
    view = TopView(chosen_run(args.run, to_read=True), live=console.is_terminal)
    if not console.is_terminal:
        console.print(view.frame())
        return 0
    try:
        _live(view, console, args.every)
    except KeyboardInterrupt:
        return 0
    return 0


def _live(view: TopView, console: Console, every_s: float) -> None:
    from rich.live import Live

    with (
        TerminalKeys() as keys,
        Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live,
    ):
        while True:
            live.update(view.frame(), refresh=True)
            if keys.wait(every_s) in _LEAVE:
                return


class TopView:
    """One run, frame by frame, through its attempts. ``live``: keys are heard."""

    def __init__(self, run: RunDirectory, *, live: bool) -> None:
        self._run, self._live = run, live
        self._reader = SnapshotReader(run)
        self._state = run_state(run)
        self._asked = time.monotonic()

    def frame(self) -> RenderableType:
        if time.monotonic() - self._asked >= STATE_EVERY_S:
            self._state, self._asked = run_state(self._run), time.monotonic()
        snapshot, state = self._reader.read(), self._state
        if state.word in (WAITING, SUSPENDED) and state.living:
            snapshot = dataclasses.replace(
                snapshot, waits_for=f"waits in the queue: {state.detail or 'no reason given'}"
            )
        snapshot = dataclasses.replace(snapshot, gone=not state.living)
        parts: list[RenderableType] = [state_line(self._run, state)]
        parts += [] if snapshot.gone else [_throughput(snapshot)]
        parts.append(render(self._run.run_id, snapshot, elapsed_s(self._run, state)))
        failure = readable_failure(self._run)
        if failure is not None:
            parts.append(Text(str(failure), style="red"))
        if self._live:
            leave = "q leaves this view; the run goes on" if state.living else "q leaves this view"
            parts.append(Text(leave, style="dim"))
        return Group(*parts)


def _throughput(snapshot: Snapshot) -> Text:
    """Rates of the whole run in one line."""
    run = snapshot.run
    if run is None:
        return Text("no rollout service has reported in this attempt", style="dim")
    healthy = sum(server.healthy for server in run.servers)
    told = [
        f"{run.rollouts_per_s:.2f} rollouts/s",
        f"{sum(server.tokens_per_s for server in run.servers):.0f} tokens/s",
        f"{healthy} of {count(len(run.servers), 'server')} healthy",
        count(len(run.workers), "worker"),
    ]
    age = time.time() - run.time
    stale = f"  ({age:.0f} s ago)" if age > 10 else ""
    return Text("  ".join(told) + stale)
