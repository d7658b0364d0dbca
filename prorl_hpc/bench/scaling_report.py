"""report.md, summary.json and the plots of a series, made from its points alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.figures import Machine, Report
from prorl_hpc.bench.scaling_figures import NODES, series_figures
from prorl_hpc.bench.scaling_records import REPORT_FILE, SUMMARY_FILE, PointResult, Series
from prorl_hpc.bench.scaling_simulated import SimulatedSeries
from prorl_hpc.bench.scaling_tables import failed_table, rates_table, times_table, use_table


class Summary(msgspec.Struct, frozen=True):
    """summary.json."""

    report: Report
    series: Series
    results: list[PointResult]
    simulated: SimulatedSeries | None


def write_report(
    folder: Path, series: Series, results: Sequence[PointResult], simulated: SimulatedSeries | None = None
) -> Report:
    """Write report.md, summary.json and plots/ into ``folder``; returns the figures. Points without a result are told
    as not measured. May be called again at any time."""
    report = Report.of(Machine.here(), series_figures(series.points, results, simulated))
    text = "\n\n".join(_sections(series, results, simulated, report))
    (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
    summary = Summary(report, series, list(results), simulated)
    (folder / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return report


def _sections(
    series: Series, results: Sequence[PointResult], simulated: SimulatedSeries | None, report: Report
) -> Iterator[str]:
    yield "# Scaling of the rollout service"
    yield f"Asked for by `{shlex.join(series.command)}`, place: {series.place}."
    if failed := failed_table(series.points, results):
        yield f"## Points without a rate\n\n{failed}"
    if any(result.spec.series == NODES for result in results):
        yield f"## Rollouts per second\n\n{rates_table(results)}"
    yield f"## Use\n\n{use_table(results)}"
    yield f"## Times\n\nMean (median, 99th percentile).\n\n{times_table(results)}"
    yield f"## Figures\n\n{report.markdown()}"
