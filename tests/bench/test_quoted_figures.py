"""Figures that pages quote are those of the page of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.bench.quoted_figures import figures, quotes, refresh
from prorl_hpc.messages.errors import ConfigError

_BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_TABLE = """# Benchmarks
<!-- bench tools -->
| figure | value | against | goal | holds | how |
|---|---|---|---|---|---|
| a \\| b, median | 2.225 x | c | >= 1 | yes | |
| a \\| b, median | 9 x | d | | – | |
| memory | 51234 MiB | | | – | |
| gone | not taken | | | – | no disk |
<!-- end -->
| outside | 5 s |
"""


def test_every_figure_that_the_documentation_quotes_is_in_the_page_of_benchmarks() -> None:
    for quote in quotes(_BENCHMARKS):
        assert quote.says == quote.should, (
            f"{quote.page}: {quote.figure} says {quote.says!r}, docs/benchmarks.md {quote.should!r}"
        )


def test_values_of_a_page() -> None:
    assert figures(_TABLE) == {
        ("tools", "a | b, median"): "2.23 ×",
        ("tools", "memory"): "51200 MiB",
        ("tools", "gone"): "not taken",
    }


def test_quotes_are_written_anew(tmp_path: Path) -> None:
    benchmarks, readme = _project(tmp_path, "fast: <!-- figure tools: a | b, median -->1 ×<!-- /figure -->, so.\n")
    assert [(quote.page, quote.says, quote.should) for quote in refresh(benchmarks)] == [(readme, "1 ×", "2.23 ×")]
    assert readme.read_text() == "fast: <!-- figure tools: a | b, median -->2.23 ×<!-- /figure -->, so.\n"
    assert refresh(benchmarks) == [] and benchmarks.read_text() == _TABLE


@pytest.mark.parametrize("quoted", ["<!-- figure tools: memory -->1", "<!-- figure memory -->1<!-- /figure -->"])
def test_damaged_marks_are_told(quoted: str, tmp_path: Path) -> None:
    benchmarks, _ = _project(tmp_path, quoted)
    with pytest.raises(ConfigError, match=r"README\.md has a mark"):
        list(quotes(benchmarks))


def test_a_figure_that_was_not_measured_stays_and_is_told(tmp_path: Path) -> None:
    quoted = "<!-- figure tools: speed -->1 ×<!-- /figure --> and <!-- figure tools: memory -->2<!-- /figure -->"
    benchmarks, readme = _project(tmp_path, quoted)
    missing, changed = refresh(benchmarks)
    assert missing.should is None and "tools: speed" in str(missing) and changed.should == "51200 MiB"
    assert readme.read_text() == quoted.replace(">2<", ">51200 MiB<")


def _project(directory: Path, readme: str) -> tuple[Path, Path]:
    (directory / "docs").mkdir()
    (directory / "docs" / "benchmarks.md").write_text(_TABLE)
    (directory / "README.md").write_text(readme)
    return directory / "docs" / "benchmarks.md", directory / "README.md"
