"""``prorl-hpc image convert LIST``: all images of a dataset into the cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from prorl_hpc.cli.image_words import size_text, tell
from prorl_hpc.sandbox.images.building import BuildOptions
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.conversion import FAILED, WAITING, Report, convert
from prorl_hpc.sandbox.images.reference_lists import COLUMNS, read_references


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("list", type=Path, help="one reference a line, or .jsonl, .json, .csv, .tsv or .parquet")
    parser.add_argument(
        "--column", default="", help=f"the column with the image (default: the first of {', '.join(COLUMNS)})"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, metavar="N", help="so many at a time (default: 2)")
    parser.add_argument("--tries", type=int, default=3, metavar="N", help="when the network fails (default: 3)")
    parser.add_argument("--report", type=Path, help="where the report goes (default: LIST.report.json)")
    parser.add_argument("--verbose", action="store_true", help="show the builders' lines")


def run(args: argparse.Namespace, cache: ImageCache, options: BuildOptions) -> int:
    """1 if an image failed. What is in the cache is skipped, so the same command goes on after whatever stopped it."""
    references = read_references(args.list, args.column)
    report_path: Path = args.report or args.list.with_name(f"{args.list.name}.report.json")
    present = sum(cache.find(reference.cache_name) is not None for reference in references)
    tell(f"{len(references)} images, {present} of them in {cache.directory}; {args.jobs} at a time")
    try:
        report = convert(
            cache,
            references,
            at_a_time=args.jobs,
            tries=args.tries,
            options=options,
            report_path=report_path,
            tell=tell,
            verbose=args.verbose,
        )
    except KeyboardInterrupt:
        tell(f"stopped; report: {report_path}. The same command goes on from here")
        raise
    print(summary(report, report_path))
    return 1 if report.count(FAILED) or report.count(WAITING) else 0


def summary(report: Report, path: Path) -> str:
    """The counts, and what did not work; why was told when it happened, and is in the report."""
    lines = [", ".join(f"{number} {state}" for state, number in report.counts.items() if number)]
    for outcome in report.outcomes:
        if outcome.state == FAILED:
            lines.append(f"failed: {outcome.reference} (tries: {outcome.tries})")
    total = sum(outcome.size for outcome in report.outcomes)
    why = ", and why each one failed" if report.count(FAILED) else ""
    lines.append(f"{size_text(total)} in the cache; report{why}: {path}")
    return "\n".join(lines)
