"""``prorl-hpc bench fit RUN``: how long a real engine takes, from a run that recorded its requests.

The model goes into a file of the group ``latency``, for scripted engines: exit code 0 if it was written, 2 if the run
does not tell enough.
"""

from __future__ import annotations

import argparse

from prorl_hpc.bench.disk_errors import given_path
from prorl_hpc.messages.errors import ConfigError


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    from prorl_hpc.bench.fit import fit, latency_file, write_fit

    file = args.out or latency_file(args.name)
    if file.exists() and not args.force:
        raise ConfigError(f"{file} is there already: give another --name, or --force to write over it")
    found = fit(args.run)
    write_fit(found, file)
    print(found.text())
    print(f"written: {file}" + ("" if args.out else f"\nuse it with engine=scripted latency={args.name}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc bench fit",
        description="fit the scripted engine's times to a run of a real engine that had engine.record_requests=true",
    )
    parser.add_argument("run", type=given_path, metavar="RUN", help="its directory, such as runs/latest")
    parser.add_argument("--name", default="fitted", help="of the latency model (fitted): latency=NAME chooses it")
    parser.add_argument(
        "--out", type=given_path, metavar="FILE", help="write there, and not where latency=NAME is found"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    return parser
