"""``prorl-hpc bench report A B …``: series or runs side by side; of one series alone, its report once more.

Exit codes: 0 it was written or shown, 1 a figure of the one series does not hold, 2 a folder holds no series.
"""

from __future__ import annotations

import argparse

import msgspec
from rich.console import Console
from rich.text import Text

from prorl_hpc.bench.disk_errors import given_path
from prorl_hpc.bench.scaling_records import SERIES_FILE
from prorl_hpc.messages.errors import ConfigError


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    folders = [path.expanduser() for path in args.folders]
    for folder in folders:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "is not there"
            raise ConfigError(f"{folder} {what}: name folders of `bench scaling`, or run directories")
    if len(folders) == 1 and (folders[0] / SERIES_FILE).exists():
        from prorl_hpc.cli.bench_scaling import check_write, report, sayer, simulated_nodes

        check_write(args.write)
        return report(folders[0].absolute(), simulated_nodes(args.simulate), args.json, sayer(), args.write)
    for name in ("simulate", "write"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for one series: name its folder alone")
    from prorl_hpc.bench.series_compare import compare

    found = compare(folders)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    console = Console(highlight=False)
    console.print(found.table())
    for words in found.differences:
        console.print(Text(words), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc bench report",
        description="series or runs side by side; of one series alone, its report and plots are written once more",
    )
    parser.add_argument(
        "folders", nargs="+", type=given_path, metavar="DIR", help="of `bench scaling`, or a run directory"
    )
    parser.add_argument("--simulate", metavar="nodes=16,64,…", help="go on with the plot by simulation")
    parser.add_argument(
        "--write",
        type=given_path,
        metavar="FILE",
        help="also write the table of one series into FILE (docs/benchmarks.md), and the picture beside it",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    return parser
