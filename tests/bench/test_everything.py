"""`prorl-hpc bench all`: a bench that fails is told and the others go on, and the page says what was measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec
import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.bench import everything_plan
from prorl_hpc.bench.everything import Bench, Everything, Outcome, run_all, run_one, summary
from prorl_hpc.bench.everything_page import check_page, copy_pictures, write_page
from prorl_hpc.bench.figures import Figure, Machine, Report
from prorl_hpc.bench.quoted_figures import figures
from prorl_hpc.bench.scaling import points_of, read_words
from prorl_hpc.cli import bench_all
from prorl_hpc.cli.bench import BENCHES
from prorl_hpc.messages.errors import ConfigError

_FAKE = """
import sys, time
name, words = sys.argv[2], sys.argv[3:]
print("[     3 s] looks around", file=sys.stderr, flush=True)
if name == "breaks":
    sys.exit("no disk")
if name == "hangs":
    time.sleep(600)
holds = "true" if name == "good" else "false"
print('{"machine": {"cpus": 2, "model": "M", "memory_gib": 1.0, "kernel": "k", "python": "p", "load": 0.5}, '
      '"commit": "c", "date": "d", "figures": [{"name": "speed of ' + " ".join(words[:-1]) + '", "value": 2.0, '
      '"unit": "x", "against": "", "goal": ">= 1", "holds": ' + holds + '}]}')
sys.exit(0 if name == "good" else 1)
"""
_PROGRAM = (sys.executable, "-c", _FAKE)
_MARKS = "".join(
    f"## bench {name}\n<!-- bench {name} -->\nstale table\n<!-- end -->\nkept\n" for name in ("all", "good", "breaks")
)


def test_a_bench_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []
    benches = [Bench("breaks", [], []), Bench("misses", [], []), Bench("good", ["all"], ["a", "bit"])]
    found = run_all(benches, True, tmp_path / "out", "bench all", told.append, _PROGRAM)
    assert [outcome.exit_code for outcome in found.outcomes] == [1, 1, 0]
    broken, missed, good = (outcome.report.figures[0] for outcome in found.outcomes)
    assert broken.value is None and "exit code 1" in broken.detail and "no disk" in broken.detail
    assert (missed.holds, good.holds, good.name) == (False, True, "speed of a bit")
    assert not found.all_hold
    assert "breaks: looks around" in told and "1 of 3: bench breaks" in told
    assert (tmp_path / "out" / "breaks.log").read_text().endswith("no disk\n")
    assert msgspec.json.decode((tmp_path / "out" / "good.json").read_bytes(), type=Report).all_hold


def test_a_bench_that_hangs_is_ended(tmp_path: Path) -> None:
    outcome = run_one("hangs", [], tmp_path, 0.5, lambda words: None, _PROGRAM)
    assert outcome.exit_code < 0
    assert "was ended after" in outcome.report.figures[0].detail
    assert summary(outcome).endswith("not bench hangs")


def test_all_hold_only_if_every_bench_says_so() -> None:
    assert _found([_outcome("good", 0)]).all_hold
    assert not _found([_outcome("good", 0), _outcome("other", 1)]).all_hold


def test_the_page_has_the_machine_once_and_a_table_for_each_bench(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(_MARKS)
    check_page(page, ["good", "breaks"])
    write_page(page, _found([_outcome("good", 0), _outcome("breaks", 1)]), quick=False)
    text = page.read_text()
    assert text.count("a machine's model") == text.count("2026-01-01") == text.count("commit c0ffee") == 1
    assert "| [good](#bench-good) | `prorl-hpc bench good` | 1 | 1 | 12 | 0.25 |" in text
    assert text.count("| speed of good | 2 x |") == 1 and "stale" not in text and text.count("kept") == 3


def test_quick_tables_stand_under_the_head_and_are_quoted_where_there_are_no_others(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(_MARKS)
    write_page(page, _found([_outcome("good", 0), _outcome("breaks", 1)]), quick=True)
    text = page.read_text()
    assert (
        "### good, quick" in text and "### breaks, quick" in text and text.count("stale") == _MARKS.count("stale") - 1
    )
    assert figures(text)["good", "speed of good"] == "2 ×"
    whole = text.replace("<!-- bench good -->\n", "<!-- bench good -->\n| speed of good | 3 x |\n")
    assert figures(whole)["good", "speed of good"] == "3 ×"


def test_pictures_that_were_drawn_go_beside_the_page(tmp_path: Path) -> None:
    page, series = tmp_path / "docs" / "benchmarks.md", tmp_path / "out" / "scaling"
    page.parent.mkdir()
    page.write_text("<!-- bench scaling -->\n<!-- end -->\n")
    assert copy_pictures(series, page, quick=True) == []
    plots = series / "plots"
    plots.mkdir(parents=True)
    (plots / "scaling.png").write_bytes(b"drawn")
    (copied,) = copy_pictures(series, page, quick=True)
    assert copied.parent == page.parent and copied.read_bytes() == b"drawn"


def test_the_picture_of_a_whole_series_is_not_replaced_by_a_quick_one(tmp_path: Path) -> None:
    page, plots = tmp_path / "benchmarks.md", tmp_path / "scaling" / "plots"
    page.write_text("<!-- bench scaling -->\n| rate at 1 node | 1 |\n<!-- end -->\n")
    plots.mkdir(parents=True)
    (plots / "scaling.png").write_bytes(b"drawn")
    assert copy_pictures(tmp_path / "scaling", page, quick=True) == []
    assert len(copy_pictures(tmp_path / "scaling", page, quick=False)) == 1


def test_the_page_is_looked_at_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- bench all -->\n<!-- end -->\n")
    monkeypatch.setattr(bench_all, "run_all", lambda *_: pytest.fail("it measured first"))
    assert main(["bench", "all", "--quick", "--write", str(page)]) == 2
    assert "<!-- bench conformance -->" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no place"):
        check_page(page, ["all", "other"])


def test_what_is_printed_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_all, "run_all", lambda *_: _found([_outcome("good", 0), _outcome("other", 1)]))
    assert main(["bench", "all", "--out", str(tmp_path)]) == 1
    assert "bench other: 1 of 1 figures hold" in capsys.readouterr().out
    assert main(["bench", "all", "--json", "--out", str(tmp_path)]) == 1
    assert msgspec.json.decode(capsys.readouterr().out, type=Everything).outcomes[0].name == "good"


def test_every_bench_is_run() -> None:
    assert {bench.name for bench in everything_plan.benches()} == set(BENCHES) - everything_plan.NO_BENCHES


def test_the_quick_words_name_parts_and_points_that_there_are() -> None:
    for bench in everything_plan.benches():
        if "--part" in bench.quick:
            parts = importlib.import_module(f"prorl_hpc.bench.{bench.name}").PARTS
            assert set(bench.quick[bench.quick.index("--part") + 1 :]) <= set(parts), bench.name
    (scaling,) = (bench for bench in everything_plan.benches() if bench.name == "scaling")
    full, quick = (
        points_of(read_words([words[0], words[1]]), "local", quick=quick)
        for words, quick in ((scaling.words, False), (scaling.quick, True))
    )
    assert {point.nodes for point in full} == {1, 2, 4, 8} > {point.nodes for point in quick}
    batches = {point.name: point.load.batches for point in full}
    assert 0 < next(p.load.batches for p in quick if p.series == "batch") < batches["batch-asynchronous-1"]


def _outcome(name: str, code: int) -> Outcome:
    machine = Machine(2, "a machine's model", 1.0, "k", "p", 0.25)
    report = Report(machine, "c0ffee", "2026-01-01", [Figure.at_least(f"speed of {name}", 2.0, 1.0, "x", "")])
    return Outcome(name, f"prorl-hpc bench {name}", 12.3, code, report)


def _found(outcomes: list[Outcome]) -> Everything:
    return Everything(outcomes[0].report.machine, "c0ffee", "2026-01-01", "prorl-hpc bench all", 70.0, outcomes)
