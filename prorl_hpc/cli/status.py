"""``prorl-hpc status [RUN] [--json] [--watch SECONDS]``: where runs stand; without RUN a table of all of yours.

``--json`` prints one object. Without RUN it is ``{"runs": [row, …], "more": N}``, newest first, ``more`` beyond ``--limit``;
a row is ``id``, ``run`` (directory), ``status`` (waiting, running, draining, suspended, finished, failed, stopped, ended,
unknown, not submitted), ``detail`` (why), ``job``, ``job_kind`` (slurm, local), ``job_state`` and ``reason`` (Slurm's words),
``start`` (actual or expected, as Slurm writes it), ``left_s`` (until the time limit), ``submitted`` (seconds since the
epoch), ``attempt``, ``step``, ``steps``, ``reward``, ``overrides`` (of its launch). With RUN it is that row with ``rewards``,
``processes`` ({name: {node, phase, detail}}), ``restarts``, ``paused``, ``holds`` (seconds for which who holds rollouts
back, beside a pause), ``draining``, ``policies`` ([{policy,
newest_version, servers, eligible, rollouts, reward, seconds, finishes, generated_tokens}]: ended rollouts by status, mean
reward and seconds of those that are done, why conversations ended), ``last_step`` (the newest step's line of metrics.jsonl:
``idle_fraction``, ``staleness``, ``weight_version`` and more, see prorl_hpc.observe.metrics), ``lost_nodes`` (of the newest attempt),
``attempts`` ([{attempt, begun, ended, seconds, ending, reason, goes_on, job, exit_code, steps, rollouts, lost_nodes}];
``ending`` is finished, stopped, suspended, failed, cut off or never began; ``goes_on``: it went on, or will by itself),
``process_ends`` ([{name, node, exit_code, how}]) and ``failure``.
With ``--watch`` there is one such line a cycle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, RenderableType

from prorl_hpc.cli.run_choice import add_run_argument, chosen_run, known_runs
from prorl_hpc.cli.run_detail import detail_json, detail_view
from prorl_hpc.cli.run_list import run_table
from prorl_hpc.cli.run_rows import RunRow
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.run_states import run_state, run_states

LIMIT = 20
MIN_WATCH_S, MAX_WATCH_S = 1.0, 86400.0
PLAIN_WIDTH = 160
"""Columns where standard output is no terminal."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the display")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help=f"the newest N runs ({LIMIT})")
    parser.add_argument("--all", action="store_true", help="all runs")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="again and again, until Ctrl-C")
    args = parser.parse_args(argv)
    if args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: give a number, 1 or more")
    if args.watch is not None and not MIN_WATCH_S <= args.watch <= MAX_WATCH_S:
        raise ConfigError(
            f"--watch {args.watch:g}: give seconds from {MIN_WATCH_S:g}, for each cycle asks Slurm's controller, to "
            f"{MAX_WATCH_S:g}"
        )
    limit = None if args.all else args.limit
    if args.run is not None:
        run = chosen_run(args.run, to_read=True)
        _show(lambda: detail_json(run, run_state(run)), lambda: detail_view(run, run_state(run)), args.json, args.watch)
    else:
        _show(lambda: list_json(limit), lambda: list_view(limit), args.json, args.watch)
    return 0


def list_json(limit: int | None) -> dict[str, Any]:
    rows, more = _rows(limit)
    return {"runs": [row.as_json for row in rows], "more": more}


def list_view(limit: int | None) -> RenderableType:
    rows, more = _rows(limit)
    if not rows:
        return "you have no runs yet: `prorl-hpc launch` starts one"
    table = run_table(rows)
    if not more:
        return table
    from rich.console import Group

    return Group(table, f"… and {more} older: --all, or --limit N")


def _rows(limit: int | None) -> tuple[list[RunRow], int]:
    runs = known_runs()
    shown = runs[:limit]
    return [RunRow.of(run, state) for run, state in zip(shown, run_states(shown), strict=True)], len(runs) - len(shown)


def _show(
    told: Callable[[], dict[str, Any]], view: Callable[[], RenderableType], as_json: bool, watch: float | None
) -> None:
    """Once, or every ``watch`` seconds."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if as_json:
        for _ in _cycles(watch):
            print(json.dumps(told()), flush=True)
    elif watch is None or not console.is_terminal:
        for cycle in _cycles(watch):
            console.print(*([""] if cycle else []), view(), sep="\n", highlight=False)
    else:
        from rich.live import Live

        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            for _ in _cycles(watch):
                live.update(view(), refresh=True)


def _cycles(every_s: float | None) -> Iterator[int]:
    cycle = 0
    while True:
        begun = time.monotonic()
        yield cycle
        if every_s is None:
            return
        time.sleep(max(0.0, every_s - (time.monotonic() - begun)))
        cycle += 1
