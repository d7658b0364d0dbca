"""``prorl-hpc bench all``: every bench, and the page that is written from them.

Exit code 0 if every bench took all its figures and they hold, 1 otherwise.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from prorl_hpc.bench import disk_errors
from prorl_hpc.bench.disk_errors import given_path
from prorl_hpc.bench.everything import Everything, run_all, summary
from prorl_hpc.bench.everything_page import SCALING, check_page, copy_pictures, write_page
from prorl_hpc.bench.everything_plan import benches
from prorl_hpc.bench.quoted_figures import quotes, refresh


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    plan = benches()
    if args.write:
        check_page(args.write, [bench.name for bench in plan])
        list(quotes(args.write))  # marks that are damaged are told before anything is measured
    folder = args.out or Path(time.strftime("bench-all-%Y%m%d-%H%M%S"))
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {words}", file=sys.stderr, flush=True)

    # Told to end, it ends the bench that runs, as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with disk_errors.told(f"--out {folder}"):
        found = run_all(plan, args.quick, folder, shlex.join(["prorl-hpc", "bench", "all", *argv]), say)
    if args.write:
        write_page(args.write, found, quick=args.quick)
        for picture in copy_pictures(folder / SCALING, args.write, quick=args.quick):
            say(f"{picture} is written")
        for quote in refresh(args.write):
            say(str(quote))
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found, folder, Console(highlight=False))
    return 0 if found.all_hold else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc bench all",
        description="every bench, one after the other, each a process of its own; one that fails is told, the others go on",
    )
    parser.add_argument("--quick", action="store_true", help="15 minutes on two cores: smaller sizes, fewer parts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument(
        "--write",
        type=given_path,
        metavar="FILE",
        help="write all tables into FILE (docs/benchmarks.md); with --quick under the head",
    )
    parser.add_argument(
        "--out", type=given_path, metavar="DIR", help="for every bench's report and log (bench-all-DATE)"
    )
    return parser


def _show(found: Everything, folder: Path, console: Console) -> None:
    for outcome in found.outcomes:
        console.print(Text(f"\n{outcome.command}"))
        outcome.report.show(console)
    console.print()
    for outcome in found.outcomes:
        console.print(Text(summary(outcome)))
    console.print(Text(f"{found.seconds / 60:.1f} minutes in all; every report and log: {folder}"))
