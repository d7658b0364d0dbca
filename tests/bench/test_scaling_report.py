"""report.md and summary.json of a series."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scaling_points import Shape, done, failed, series_of, spec

from prorl_hpc.bench.scaling_records import PointState
from prorl_hpc.bench.scaling_report import Summary, write_report


def test_efficiency_refers_to_the_smallest_measured_point(tmp_path: Path) -> None:
    results = [failed(spec(1)), done(spec(2), Shape(per_node=0.2)), done(spec(8), Shape(per_node=0.15))]
    report = write_report(tmp_path, series_of(*results), results)
    figures = {figure.name: figure for figure in report.figures}
    assert figures["efficiency at 8 nodes"].value == pytest.approx(0.75)
    assert figures["efficiency at 8 nodes"].against == "2 nodes"
    assert figures["efficiency at 8 nodes"].holds is False
    assert figures["rate at 1 node"].value is None and "its worker ended" in figures["rate at 1 node"].detail
    assert not report.all_hold


def test_a_point_that_ran_out_of_time_or_was_not_measured_is_told(tmp_path: Path) -> None:
    late = failed(spec(4), PointState.TIMED_OUT, "30 minutes were over: give time_minutes=60")
    results = [done(spec(1)), late]
    report = write_report(tmp_path, series_of(*results, done(spec(8))), results)
    text = (tmp_path / "report.md").read_text()
    assert "timed out" in text and "give time_minutes=60" in text
    assert "not measured" in text
    last = next(figure for figure in report.figures if figure.name == "efficiency at 8 nodes")
    assert last.value is None and last.goal == ">= 0.95"


def test_the_summary_holds_what_the_report_was_made_of(tmp_path: Path) -> None:
    results = [done(spec(1)), done(spec(2))]
    report = write_report(tmp_path, series_of(*results), results)
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary)
    assert summary.results == results
    assert summary.report == report
