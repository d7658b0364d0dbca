"""What a bench found: figures, each held against a goal, with the facts of the machine that they were taken on."""

from __future__ import annotations

import os
import platform
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

import prorl_hpc
from prorl_hpc.cli.environment_record import git_state
from prorl_hpc.observe.reading import read_tolerantly

_GIB = 2**30


class Figure(msgspec.Struct, frozen=True):
    """One number. ``value`` is a ratio within this run wherever a peer or a floor exists; None if it could not be
    taken, then ``detail`` says why and ``holds`` is None. ``goal`` empty: it is told, not judged."""

    name: str
    value: float | None
    unit: str
    against: str
    goal: str
    holds: bool | None
    detail: str = ""

    @classmethod
    def at_least(cls, name: str, value: float, goal: float, unit: str, against: str, detail: str = "") -> Figure:
        return cls(name, value, unit, against, f">= {goal:g}", value >= goal, detail)

    @classmethod
    def at_most(cls, name: str, value: float, goal: float, unit: str, against: str, detail: str = "") -> Figure:
        return cls(name, value, unit, against, f"<= {goal:.3g}", value <= goal, detail)

    @classmethod
    def below(cls, name: str, value: float, goal: float, unit: str, against: str, detail: str = "") -> Figure:
        return cls(name, value, unit, against, f"< {goal:g}", value < goal, detail)

    @classmethod
    def above(cls, name: str, value: float, goal: float, unit: str, against: str, detail: str = "") -> Figure:
        return cls(name, value, unit, against, f"> {goal:g}", value > goal, detail)

    @classmethod
    def exactly(cls, name: str, value: float, goal: float, unit: str, against: str, detail: str = "") -> Figure:
        return cls(name, value, unit, against, f"= {goal:g}", value == goal, detail)

    @classmethod
    def told(cls, name: str, value: float, unit: str, against: str = "", detail: str = "") -> Figure:
        """Without a goal."""
        return cls(name, value, unit, against, "", None, detail)

    @classmethod
    def not_taken(cls, name: str, unit: str, against: str, goal: str, why: str) -> Figure:
        return cls(name, None, unit, against, goal, None, why)


class Machine(msgspec.Struct, frozen=True):
    """``load`` is the load average of the minute before the bench."""

    cpus: int
    model: str
    memory_gib: float
    kernel: str
    python: str
    load: float

    @classmethod
    def here(cls) -> Machine:
        return cls(
            len(os.sched_getaffinity(0)),
            _cpu_model(),
            round(psutil.virtual_memory().total / _GIB, 1),
            platform.release(),
            platform.python_version(),
            round(os.getloadavg()[0], 2),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpus} CPUs ({self.model}), {self.memory_gib:g} GiB, Linux {self.kernel}, Python {self.python}, "
            f"load before: {self.load:g}"
        )


class Report(msgspec.Struct, frozen=True):
    """One bench's run. ``commit`` ends in -dirty if files differ from it; empty outside a checkout."""

    machine: Machine
    commit: str
    date: str
    figures: list[Figure]

    @classmethod
    def of(cls, machine: Machine, figures: Sequence[Figure]) -> Report:
        return cls(
            machine,
            commit_words(git_state(Path(prorl_hpc.__file__).parent)),
            time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            list(figures),
        )

    @property
    def all_hold(self) -> bool:
        """A figure that could not be taken is none that holds."""
        return all(figure.value is not None and figure.holds is not False for figure in self.figures)

    def show(self, console: Console) -> None:
        """A table for 80 columns, too; how each figure was taken, and the machine, stand below it."""
        table = Table()
        for title in ("figure", "value", "against", "goal", "holds"):
            table.add_column(title, overflow="fold", no_wrap=title in ("value", "goal", "holds"))
        for figure in self.figures:
            table.add_row(*map(Text, _cells(figure)[:-1]))
        console.print(table)
        how = [f"{figure.name}: {figure.detail}" for figure in self.figures if figure.detail]
        for words in (*how, str(self.machine), f"commit {self.commit or 'unknown'}, {self.date}"):
            for line in textwrap.wrap(words, console.width, subsequent_indent="  "):
                console.print(Text(line), soft_wrap=True)

    def markdown(self) -> str:
        """The same table for the documentation, with the machine above it."""
        return f"{self.machine}; commit {self.commit or 'unknown'}; {self.date}.\n\n{self.table()}"

    def table(self) -> str:
        """In Markdown."""
        lines = ["| figure | value | against | goal | holds | how |", "|---|---|---|---|---|---|"]
        rows = [[cell.replace("|", "\\|") for cell in _cells(figure)] for figure in self.figures]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join(lines)


def _cells(figure: Figure) -> tuple[str, ...]:
    value = "not taken" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
    holds = {True: "yes", False: "no", None: "–"}[figure.holds]
    return figure.name, value, figure.against, figure.goal, holds, figure.detail


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class _Environment(msgspec.Struct):
    git: dict[str, Any] | None = None


def commit_of_run(run: Path) -> str:
    """``commit_words`` of the code that the run directory ``run`` was launched with; empty if it is not known."""
    environment = read_tolerantly(run / "environment.json", _Environment)
    return "" if environment is None else commit_words(environment.git)


def commit_words(state: dict[str, Any] | None) -> str:
    """Of environment_record.git_state: the commit, with -dirty if files differ from it; empty outside a checkout."""
    return "" if state is None else str(state["commit"])[:12] + ("-dirty" if state["changed"] else "")
