"""``bench all``: every bench, one after the other, each a process of its own; one that fails is told and the others go on."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.figures import Figure, Machine, Report
from prorl_hpc.bench.parts import Say

PROGRAM = (sys.executable, "-m", "prorl_hpc")
_LIMIT_S, _QUICK_LIMIT_S = 4 * 3600.0, 1800.0
"""For one bench; one that hangs must not cost the others."""
_END_S = 120.0
"""For a bench that is told to end: it takes down what it started."""
_RELAY_S = 5.0
"""For its last lines, should a process that outlived it hold their pipe."""
_TAIL_LINES = 8
_CLOCK = re.compile(r"^\[ *\d+ s\] ")


class Bench(msgspec.Struct, frozen=True):
    """``words``: what stands behind ``bench NAME``; ``quick``: the same for ``bench all --quick``. ``{folder}`` in them is
    the directory for what a bench keeps."""

    name: str
    words: list[str]
    quick: list[str]


class Outcome(msgspec.Struct, frozen=True):
    """``command``: what repeats it. ``exit_code``: of the bench, negative if a signal ended it. A bench that left no
    report has one of a single figure that was not taken, which says why."""

    name: str
    command: str
    seconds: float
    exit_code: int
    report: Report

    @property
    def held(self) -> int:
        """Figures that were taken and do not miss a goal."""
        return sum(figure.value is not None and figure.holds is not False for figure in self.report.figures)


class Everything(msgspec.Struct, frozen=True):
    """``seconds``: of all. ``command``: what asked for it."""

    machine: Machine
    commit: str
    date: str
    command: str
    seconds: float
    outcomes: list[Outcome]

    @property
    def all_hold(self) -> bool:
        return all(outcome.exit_code == 0 and outcome.report.all_hold for outcome in self.outcomes)


def run_all(
    benches: Sequence[Bench], quick: bool, folder: Path, command: str, say: Say, program: Sequence[str] = PROGRAM
) -> Everything:
    """``folder`` gets ``NAME.json``, the report of each, and ``NAME.log``, what it told meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    machine, began = Machine.here(), time.monotonic()
    outcomes = []
    for number, bench in enumerate(benches, 1):
        say(f"{number} of {len(benches)}: bench {bench.name}")
        words = [word.format(folder=folder) for word in (bench.quick if quick else bench.words)]
        outcome = run_one(bench.name, words, folder, _QUICK_LIMIT_S if quick else _LIMIT_S, say, program)
        outcomes.append(outcome)
        say(summary(outcome))
    report = Report.of(machine, [])
    return Everything(machine, report.commit, report.date, command, time.monotonic() - began, outcomes)


def summary(outcome: Outcome) -> str:
    """One line: how many figures hold, which do not."""
    missed = [figure.name for figure in outcome.report.figures if figure.holds is False or figure.value is None]
    told = f": not {', '.join(missed)}" if missed else ""
    return f"bench {outcome.name}: {outcome.held} of {len(outcome.report.figures)} figures hold, {outcome.seconds:.0f} s{told}"


def run_one(
    name: str, words: Sequence[str], folder: Path, limit_s: float, say: Say, program: Sequence[str] = PROGRAM
) -> Outcome:
    """A bench that leaves no report, or takes longer than ``limit_s`` seconds, gives one that says so."""
    machine, began = Machine.here(), time.monotonic()
    told = ["bench", name, *words]
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    with out.open("wb") as answer:
        child = subprocess.Popen(
            [*program, *told, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        relay = threading.Thread(target=_relay, args=(child, name, log, say), daemon=True)
        relay.start()
        try:
            late = not _ends_within(child, limit_s)
        finally:
            _end(child)
            relay.join(_RELAY_S)
    try:
        report = msgspec.json.decode(out.read_bytes(), type=Report)
    except (msgspec.DecodeError, msgspec.ValidationError):
        end = f"was ended after {limit_s:.0f} s" if late else f"ended with exit code {child.returncode} and no report"
        why = f"bench {name} {end}; its last lines: {' / '.join(_last_lines(log)) or 'none'}"
        report = Report.of(machine, [Figure.not_taken(f"bench {name}", "", "", "", why)])
    return Outcome(name, shlex.join(["prorl-hpc", *told]), time.monotonic() - began, child.returncode, report)


def _relay(child: subprocess.Popen[str], name: str, log: Path, say: Say) -> None:
    """What the bench tells goes into its log and, with the bench's name for its clock, to people."""
    assert child.stderr is not None
    with child.stderr, log.open("w", encoding="utf-8") as kept:
        for line in child.stderr:
            kept.write(line)
            kept.flush()
            say(f"{name}: {_CLOCK.sub('', line.rstrip())}")


def _ends_within(child: subprocess.Popen[str], limit_s: float) -> bool:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(child: subprocess.Popen[str]) -> None:
    """It shares our process group, so that Ctrl-C has reached it already; what is left is told, then killed."""
    if child.poll() is None:
        child.terminate()
        if not _ends_within(child, _END_S):
            child.kill()
            child.wait()


def _last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
