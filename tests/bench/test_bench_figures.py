"""Figures, the machine they were taken on, and the page that they are written into."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from prorl_hpc.bench.document import write_into
from prorl_hpc.bench.figures import Figure, Machine, Report, commit_of_run
from prorl_hpc.messages.errors import ConfigError


def test_what_holds() -> None:
    assert Figure.at_least("a", 3.0, 3.0, "x", "peer").holds is True
    assert Figure.at_least("a", 2.9, 3.0, "x", "peer").holds is False
    assert Figure.at_most("b", 0.8, 0.8, "x", "").holds is True
    assert Figure.at_most("b", 0.81, 0.8, "x", "").holds is False
    assert Figure.below("b", 10.0, 10.0, "ms", "").holds is False
    assert Figure.exactly("c", 0, 0, "rollouts", "").holds is True
    missing = Figure.not_taken("d", "x", "peer", ">= 3", "no network")
    assert (missing.value, missing.holds, missing.detail) == (None, None, "no network")


def test_a_figure_without_a_goal_breaks_no_report_and_a_missing_one_does() -> None:
    machine = Machine.here()
    told = Figure.told("e", 1.0, "x")
    missing = Figure.not_taken("d", "x", "peer", ">= 3", "no network")
    held = Figure.exactly("c", 0, 0, "", "")
    assert Report.of(machine, [told, held]).all_hold
    assert not Report.of(machine, [told, held, missing]).all_hold
    assert not Report.of(machine, [told, Figure.exactly("c", 1, 0, "", "")]).all_hold


def test_the_json_is_one_object_with_the_machine() -> None:
    told = msgspec.json.decode(msgspec.json.encode(Report.of(Machine.here(), [Figure.told("e", 1.0, "x")])))
    assert set(told) == {"machine", "commit", "date", "figures"}
    assert set(told["figures"][0]) == {"name", "value", "unit", "against", "goal", "holds", "detail"}
    assert told["machine"]["cpus"] >= 1 and told["machine"]["memory_gib"] > 0


def test_a_page_gets_the_newest_table_and_keeps_its_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Words\n<!-- bench soak -->\nstale\n<!-- end -->\nmore\n<!-- bench x -->\nkept\n<!-- end -->\n")
    write_into(page, "soak", Report.of(Machine.here(), [Figure.exactly("lost", 0, 0, "rollouts", "ids")]))
    text = page.read_text()
    assert "| lost | 0 rollouts | ids | = 0 | yes |" in text
    assert "stale" not in text and text.startswith("# Words\n") and text.count("kept\n<!-- end -->") == 1
    with pytest.raises(ConfigError, match="no place"):
        write_into(page, "coordinator", Report.of(Machine.here(), []))


def test_the_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = [
        Figure.at_most("bash `echo hello`, median", 1.2345, 2.5, "x", "bare [bold]", " ".join(["words"] * 40)),
        Figure.not_taken("tmux", "x", "tmux", "<= 0.0333", "there is no tmux"),
    ]
    Report.of(Machine.here(), figures).show(Console(highlight=False))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and all(line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    assert "1.234 x" in text and "[bold]" in text and "tmux: there is no tmux" in text


def test_the_commit_of_a_run_is_what_it_was_launched_with(tmp_path: Path) -> None:
    assert commit_of_run(tmp_path) == ""
    environment = tmp_path / "environment.json"
    for git, words in (("null", ""), ('{"commit": "0123456789abcdef", "changed": true}', "0123456789ab-dirty")):
        environment.write_text(f'{{"host": "a", "git": {git}}}')
        assert commit_of_run(tmp_path) == words
