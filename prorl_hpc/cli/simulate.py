"""``prorl-hpc simulate``: the rollout service's own scheduler under a virtual clock, at any size, with any times."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_compare import compare
from prorl_hpc.bench.simulation_config import SimulationConfig, read_config, settings
from prorl_hpc.bench.simulation_plot import draw_simulation
from prorl_hpc.bench.simulation_report import as_json, comparison_as_json, comparison_table, tables
from prorl_hpc.messages.errors import ConfigError

_LINE_EVERY_S = 10.0
_PLAIN_WIDTH = 140

Look = Callable[[int, float], None]


def main(argv: list[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    config = read_config(arguments.settings, arguments.config)
    plot = _plot_path(config)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    with _Display(config.rollouts) as display:
        if arguments.compare:
            comparison = compare(config, display.look)
            results = comparison.results
        else:
            results = {"simulation": simulate(config, display.look("simulation"))}
    if plot is not None:
        draw_simulation(results, plot)
    if arguments.json:
        only = next(iter(results.values()))
        print(json.dumps(comparison_as_json(comparison) if arguments.compare else as_json(only)))
        return 0
    if arguments.compare:
        console.print(comparison_table(comparison))
        for name, reason in comparison.left_out.items():
            console.print(f"left out: {name}: {reason}", highlight=False)
    else:
        for table in tables(results["simulation"]):
            console.print(table)
    if plot is not None:
        console.print(f"plot: {plot}", highlight=False, soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings:\n{_list_of_settings()}",
    )
    parser.add_argument("settings", nargs="*", metavar="name=value", help="settings, see below")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings from a file; name=value goes before")
    parser.add_argument("--compare", action="store_true", help="policies side by side on the same draws")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _list_of_settings() -> str:
    lines = []
    for name, default, meaning in settings():
        shown = "" if default in ("", {}) else f"={str(default).lower() if isinstance(default, bool) else default}"
        lines += textwrap.wrap(
            meaning, 118, initial_indent=f"  {name + shown:<30}  ", subsequent_indent=" " * 34, break_on_hyphens=False
        )
    return "\n".join(lines)


def _plot_path(config: SimulationConfig) -> Path | None:
    """Found out before the work: a long simulation must not fail at its plot. Raises ConfigError."""
    if not config.plot:
        return None
    path = Path(config.plot)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"plot={config.plot}: name a file in a directory that exists, or give plot= for none")
    return path


class _Display:
    """A bar on a terminal, else a line now and then; on standard error, for the result goes to standard output."""

    def __init__(self, rollouts: int) -> None:
        self._rollouts = rollouts
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def look(self, name: str) -> Look:
        task = self._bar.add_task(name, total=self._rollouts)
        told = time.monotonic()

        def seen(ended: int, now: float) -> None:
            nonlocal told
            self._bar.update(task, completed=min(ended, self._rollouts))
            if self._bar.disable and time.monotonic() - told > _LINE_EVERY_S:
                told = time.monotonic()
                print(f"{name}: {ended:,} rollouts ended after {now:,.0f} s of virtual time", file=sys.stderr)

        return seen
