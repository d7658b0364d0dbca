"""report.md and summary.json of a series."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scaling_points import Shape, done, failed, series_of, spec

from prorl_hpc.bench.scaling_records import PointResult, PointState
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


def test_a_point_whose_processes_died_or_whose_turns_were_cut_is_told_above_the_rates(tmp_path: Path) -> None:
    shape = Shape(restarts={"worker-0": 2, "coordinator": 1}, short_turns=7)
    results = [done(spec(1)), done(spec(2), shape), done(spec(1, "pools", "stages"))]
    results.append(done(spec(1, "pools", "coupled"), Shape(restarts={"inference-0": 1})))
    report = write_report(tmp_path, series_of(*results), results)
    above, _, _ = (tmp_path / "report.md").read_text().partition("## Rollouts per second")
    assert "**Mind nodes-2**: died and started again: coordinator once, worker-0 2 times" in above
    assert "**Mind nodes-2**: 7 turns had fewer tokens than the workload's row wants" in above
    assert "Mind nodes-1" not in above
    figures = {figure.name: figure.detail for figure in report.figures}
    assert "worker-0 2 times" in figures["rate at 2 nodes"] and "worker-0 2 times" in figures["efficiency at 2 nodes"]
    assert "again" not in figures["rate at 1 node"]
    assert "Mind one coupled pool: died and started again: inference-0 once" in figures["pools: rollouts/s"]


def test_settings_that_the_command_gave_are_told_in_the_set_up(tmp_path: Path) -> None:
    series = series_of(done(spec(1)))
    words = ["workload=math-like", "task.options.kinds.math.turns=constant:3", "--simulate", "nodes=8", "rollouts=4"]
    series = msgspec.structs.replace(series, command=[*series.command, *words])
    write_report(tmp_path, series, [done(spec(1))])
    _, _, set_up = (tmp_path / "report.md").read_text().partition("## Set-up")
    assert "`task.options.kinds.math.turns=constant:3`" in set_up.partition("##")[0]
    assert "nodes=8" not in set_up.partition("## How busy")[0]


def test_the_held_share_is_shown_where_there_is_one_pool(tmp_path: Path) -> None:
    coupled = done(spec(1), Shape(utilisation={"coupled": 0.9, "run": 0.3}))
    write_report(tmp_path, series_of(coupled), [coupled])
    text = (tmp_path / "report.md").read_text()
    assert "| RUN | EVAL | held (coupled) |" in text and "| 30.0 % | – | 90.0 % |" in text
    write_report(tmp_path, series_of(done(spec(1))), [done(spec(1))])
    assert "held (coupled)" not in (tmp_path / "report.md").read_text()


def with_error(result: PointResult, error: float) -> PointResult:
    return msgspec.structs.replace(result, figures=msgspec.structs.replace(result.figures, steady_error=error))


def test_how_well_a_rate_is_known_and_that_there_were_too_few_rollouts(tmp_path: Path) -> None:
    results = [with_error(done(spec(1)), 0.03), with_error(done(spec(2), Shape(per_node=0.124)), 0.14)]
    report = write_report(tmp_path, series_of(*results), results)
    text = (tmp_path / "report.md").read_text()
    assert "| 0.1 ± 3 % | 1.000 |" in text and "| 0.248 ± 14 % | 1.240 ± 14 % |" in text
    assert "**1.240**, known to ± 14 % only" in text
    assert "**Mind nodes-2**: its rate is known to ± 14 % only" in text and "Mind nodes-1" not in text
    details = {figure.name: figure.detail for figure in report.figures}
    assert "order more (rollouts=)" in details["efficiency at 2 nodes"] and "± 14 %" in details["rate at 2 nodes"]
    assert "order more" not in details["rate at 1 node"] and "± 3 %" in details["rate at 1 node"]


def test_an_efficiency_that_nodes_alone_do_not_give_is_doubted_though_its_error_is_not_known(tmp_path: Path) -> None:
    results = [done(spec(1)), done(spec(2), Shape(per_node=0.124))]
    report = write_report(tmp_path, series_of(*results), results)
    details = {figure.name: figure.detail for figure in report.figures}
    assert "most likely too few rollouts, order more (rollouts=)" in details["efficiency at 2 nodes"]


def test_points_of_different_commits_are_told(tmp_path: Path) -> None:
    results = [msgspec.structs.replace(done(spec(nodes)), commit=commit) for nodes, commit in ((1, "abc"), (2, "def"))]
    results.append(done(spec(4)))  # of a time that did not note it
    write_report(tmp_path, series_of(*results), results)
    assert "different code (abc: nodes-1; def: nodes-2)" in (tmp_path / "report.md").read_text()
    write_report(tmp_path, series_of(*results), results[1:])
    assert "different code" not in (tmp_path / "report.md").read_text()
