"""Figures that pages quote: ``<!-- figure BENCH: NAME -->1.92 ms<!-- /figure -->`` in README.md or docs/*.md says what the table of
that bench says in docs/benchmarks.md, to three digits. Nothing else may stand there, so that no page can promise more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prorl_hpc.messages.errors import ConfigError

_SECTION = re.compile(r"<!-- bench (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_QUICK = re.compile(r"### (\S+), quick$")
_QUOTE = re.compile(r"<!-- figure (?P<bench>[\w-]+): (?P<name>.+?) -->(?P<text>.*?)<!-- /figure -->", re.DOTALL)
_BORDER = re.compile(r"(?<!\\)\|")


class Quote(msgspec.Struct, frozen=True):
    """``says``: what stands in the page; ``should``: what it should say, None if the page of benchmarks has no such figure."""

    page: Path
    figure: str
    says: str
    should: str | None

    def __str__(self) -> str:
        if self.should is None:
            return f"{self.page} quotes {self.figure}, which the page of benchmarks does not have: {self.says} stands there still"
        return f"{self.page}, {self.figure}: {self.says} is {self.should}"


def pages(benchmarks: Path) -> list[Path]:
    """Those that may quote ``docs/benchmarks.md``: its neighbours, and the README above them."""
    benchmarks = benchmarks.resolve()
    readme = benchmarks.parent.parent / "README.md"
    beside = [page for page in sorted(benchmarks.parent.glob("*.md")) if page != benchmarks]
    return [*([readme] if readme.is_file() else []), *beside]


def quotes(benchmarks: Path) -> Iterator[Quote]:
    """Of all pages. ConfigError for marks that are not closed."""
    known = figures(benchmarks.read_text(encoding="utf-8"))
    for page in pages(benchmarks):
        text = page.read_text(encoding="utf-8")
        found = list(_QUOTE.finditer(text))
        if len(found) != text.count("<!-- figure "):
            raise ConfigError(
                f"{page} has a mark <!-- figure … --> without bench and name, or without <!-- /figure -->"
            )
        for match in found:
            should = known.get((match["bench"], match["name"]))
            yield Quote(page, f"{match['bench']}: {match['name']}", match["text"], should)


def refresh(benchmarks: Path) -> list[Quote]:
    """Write into every page what its quotes should say; those that changed, and those of which there is no figure."""
    stale = [quote for quote in quotes(benchmarks) if quote.says != quote.should]
    known = figures(benchmarks.read_text(encoding="utf-8"))
    for page in {quote.page for quote in stale}:
        page.write_text(_rewritten(page.read_text(encoding="utf-8"), known), encoding="utf-8")
    return stale


def figures(text: str) -> dict[tuple[str, str], str]:
    """(bench, name) → value and unit, of all tables between marks. Of several with one name the first of a bench's own
    section; what only ``bench all --quick`` measured is in its tables, each under a heading with its bench."""
    found: dict[tuple[str, str], str] = {}
    quick: dict[tuple[str, str], str] = {}
    for section in _SECTION.finditer(text):
        bench = section[1]
        for line in section[2].splitlines():
            if heading := _QUICK.match(line):
                bench = heading[1]
            cells = [cell.strip().replace("\\|", "|") for cell in _BORDER.split(line)]
            if len(cells) > 2 and cells[1] not in ("", "figure", "bench") and not cells[1].startswith("---"):
                (found if bench == section[1] else quick).setdefault((bench, cells[1]), _rounded(cells[2]))
    return quick | found


def _rewritten(text: str, known: dict[tuple[str, str], str]) -> str:
    def anew(match: re.Match[str]) -> str:
        value = known.get((match["bench"], match["name"]), match["text"])
        return f"<!-- figure {match['bench']}: {match['name']} -->{value}<!-- /figure -->"

    return _QUOTE.sub(anew, text)


def _rounded(cell: str) -> str:
    """``2.225 x`` → ``2.23 ×``; words as they are."""
    number, _, unit = cell.partition(" ")
    try:
        value = f"{float(f'{float(number):.3g}'):g}"
    except ValueError:
        return cell
    return f"{value} {unit}".strip() if unit != "x" else f"{value} ×"
