"""Whether finished rollouts stay out of memory: a journal is given many long ones, in a process of its own.

``python -m prorl_hpc.bench.journal_size DIRECTORY ROLLOUTS TOKENS`` is the process that is measured; it writes what it
found to DIRECTORY/found.json.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.messages.errors import RunError

GOAL_MIB = 300.0
TOKENS = 8192
_DISK_BYTES_PER_TOKEN = 25
"""At the worst, journal and Parquet together."""
_NAME = "growth of resident memory"


class Found(msgspec.Struct, frozen=True):
    """What bench.journal_memory found, MiB."""

    rss_before_mib: float
    rss_peak_mib: float
    journal_peak_mib: float
    parquet_mib: float
    seconds: float


def measure(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    rollouts = 2_000 if quick else 100_000
    with scratch_directory() as directory, Processes(directory) as processes:
        needed, free = rollouts * TOKENS * _DISK_BYTES_PER_TOKEN, shutil.disk_usage(directory).free
        if free < needed:
            why = f"{directory.parent} has {free / 1e9:.1f} GB free, this may take {needed / 1e9:.1f}: set TMPDIR"
            return [Figure.not_taken(_NAME, "MiB", "the bound", f"< {GOAL_MIB:g}", why)]
        say(f"{rollouts} rollouts of {TOKENS} tokens in {directory}")
        module = [sys.executable, "-m", "prorl_hpc.bench.journal_size"]
        processes.start("journal", [*module, str(directory), str(rollouts), str(TOKENS)])
        if (code := processes.wait("journal", 60 + rollouts / 20)) != 0:
            raise RunError(f"the journal's process ended with exit code {code}:\n{processes.tail('journal')}")
        found = msgspec.json.decode((directory / "found.json").read_bytes(), type=Found)
    growth_mib = found.rss_peak_mib - found.rss_before_mib
    detail = (
        f"{rollouts} rollouts of {TOKENS} tokens in {found.seconds:.0f} s; at the peak {found.rss_peak_mib:.0f} MiB, the "
        f"journal's file at most {found.journal_peak_mib:.0f} MiB, Parquet {found.parquet_mib:.0f} MiB"
    )
    if quick:
        detail += "; quick: a fiftieth of the 100,000 that the bound is about"
    return [Figure.below(_NAME, growth_mib, GOAL_MIB, "MiB", "the bound", detail)]


def main() -> None:
    from prorl_hpc.bench import journal_memory

    directory = Path(sys.argv[1])
    run = directory / "run"
    run.mkdir()
    found = journal_memory.measure(run, int(sys.argv[2]), int(sys.argv[3]))
    (directory / "found.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
