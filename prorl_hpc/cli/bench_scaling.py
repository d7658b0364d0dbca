"""``prorl-hpc bench scaling``: a series of runs at several node counts, with ablations beside it, and its report.

Exit codes: 0 all points are measured and all figures hold, 1 some do not, 2 wrong words, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from prorl_hpc.bench import disk_errors
from prorl_hpc.bench.document import check_place, write_into
from prorl_hpc.bench.everything_page import SCALING, copy_pictures
from prorl_hpc.bench.figures import Machine
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.scaling import points_of, read_words, whole_numbers
from prorl_hpc.bench.scaling_records import REPORT_FILE, SERIES_FILE, PointResult, Series
from prorl_hpc.bench.scaling_settings import SETTINGS
from prorl_hpc.bench.scaling_simulated import Coordinator, SimulatedSeries
from prorl_hpc.bench.series import SeriesRun
from prorl_hpc.bench.series_folder import check_folder, only_here, read_series
from prorl_hpc.cli.following import ignore_signals
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.errors import ConfigError, ProrlError


def main(argv: list[str]) -> int:
    args = _parser().parse_intermixed_args(argv)
    check_write(args.write)
    simulate = simulated_nodes(args.simulate)
    series, folder, at_once = _series(args, argv)
    say = sayer()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with only_here(folder) if not args.inside else contextlib.nullcontext():  # else the command outside has it
            if not args.inside:
                check_folder(folder, series)
            if series.place == "private" and not args.inside:
                from prorl_hpc.bench.series_private import run_in_private_cluster

                return run_in_private_cluster(series, folder, argv, say, *([args.write.parent] if args.write else []))
            with disk_errors.told(f"out={folder}"):
                SeriesRun(folder, series, say, at_once=at_once, again=args.again).run()
            code = report(folder, simulate, args.json, say, args.write)
            ignore_signals()  # all is written and told
            return code
    except (KeyboardInterrupt, SystemExit):
        again = f"go on with: prorl-hpc bench scaling out={folder}"
        say(f"the series is interrupted; {again if (folder / SERIES_FILE).exists() else 'nothing of it has begun'}")
        raise


def check_write(page: Path | None) -> None:
    """ConfigError for a page that has no place for the figures."""
    if page is not None:
        check_place(page, SCALING)


def report(folder: Path, simulate: list[int], json: bool, say: Say, page: Path | None = None) -> int:
    """Write all that the folder's points give, and show the figures. What was simulated from the same points stays, and what
    their coordinator costs is not measured again. ``page``: the figures go there too, with the picture beside it."""
    from prorl_hpc.bench.scaling_report import simulated_before, write_report
    from prorl_hpc.bench.series_results import write_results

    series, results = read_series(folder)
    before = simulated_before(folder, results)
    simulated, not_simulated = _simulated(results, simulate, before, say) if simulate else (before, "")
    with disk_errors.told(str(folder)):
        write_results(folder, results, say)
        found = write_report(folder, series, results, simulated, not_simulated=not_simulated)
    if page is not None:
        write_into(page, SCALING, found)
        for picture in copy_pictures(folder, page, quick=False):
            say(f"{picture} is written")
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        found.show(Console(highlight=False))
        print(f"report: {folder / REPORT_FILE}")
    return 0 if found.all_hold else 1


def _simulated(
    results: list[PointResult], nodes: list[int], before: SimulatedSeries | None, say: Say
) -> tuple[SimulatedSeries | None, str]:
    """And why there is none, though it was asked for: a series that it cannot be made from still has its report."""
    from prorl_hpc.bench.coordinator_cost import saturated_coordinator
    from prorl_hpc.bench.scaling_recorded import Recorded
    from prorl_hpc.bench.scaling_simulation import simulate_series

    def cost(point: Recorded) -> Coordinator:
        if before is not None:
            return before.coordinator
        heartbeat_s = RunDirectory(point.result.run_dir).load_config().rollout.heartbeat_s
        return saturated_coordinator(point.tokens, heartbeat_s, say)

    try:
        return simulate_series(results, nodes, say, cost), ""
    except (ProrlError, RunDirectoryError) as error:
        say(str(error))
        return None, str(error)


def _series(args: argparse.Namespace, argv: list[str]) -> tuple[Series, Path, int]:
    """The series that is asked for, or the one that the folder holds; where it goes; how many points at once."""
    asked = read_words(args.words)
    folder = Path(asked.out or time.strftime("scaling-%Y%m%d-%H%M%S")).expanduser().absolute()
    names = {word.partition("=")[0] for word in args.words}
    if names <= {"out", "at_once"} and not (args.local or args.private) and (folder / SERIES_FILE).exists():
        return read_series(folder)[0], folder, asked.at_once
    place = "private" if args.private else "local" if args.local else "slurm"
    if place != "slurm" and asked.at_once > 1:
        raise ConfigError(f"at_once={asked.at_once}: on one machine points are measured one at a time: leave it out")
    if place == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no Slurm here (no sbatch on PATH): run this on a login node of a cluster, or measure on this machine: "
            "--local, or --private on a Slurm cluster of its own"
        )
    chosen = [word for word in asked.overrides if word.startswith(("cluster=", "cluster.kind="))]
    if place != "slurm" and chosen:
        raise ConfigError(f"{chosen[0]} and --{place} name two places: leave one of them out")
    command = ["prorl-hpc", "bench", "scaling", *(word for word in argv if word != "--inside")]
    series = Series(command, place, points_of(asked, place, quick=args.quick), Machine.here())
    return series, folder, asked.at_once


def simulated_nodes(words: str | None) -> list[int]:
    """Of ``nodes=16,64``; none if it is not given."""
    if words is None:
        return []
    name, _, value = words.partition("=")
    if name != "nodes" or not value:
        raise ConfigError(f"--simulate {words}: expected nodes= and node counts, such as nodes=16,64,256")
    return whole_numbers("--simulate nodes", value)


def sayer() -> Say:
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {words}", file=sys.stderr, flush=True)

    return say


def _parser() -> argparse.ArgumentParser:
    settings = "\n".join(f"  {name}={what}" for name, what in SETTINGS.items())
    parser = argparse.ArgumentParser(
        prog="prorl-hpc bench scaling",
        description="a series of runs, one for each point, through Slurm unless said otherwise; then its report and plots",
        epilog=f"words and their defaults:\n{settings}\nand Hydra's, as for launch, for all points: cluster=mysite, engine=vllm",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="name=value", help="see below")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="on this machine, all nodes of a point side by side")
    where.add_argument("--private", action="store_true", help="on a Slurm cluster of this machine's own (needs root)")
    parser.add_argument("--simulate", metavar="nodes=16,64,…", help="go on with the plot by simulation")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rollouts on one machine and smaller ablations, which tell less"
    )
    parser.add_argument("--again", action="store_true", help="measure points once more that failed or ran out of time")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--write",
        type=disk_errors.given_path,
        metavar="FILE",
        help="also write the table into FILE (docs/benchmarks.md), and the picture beside it",
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser
