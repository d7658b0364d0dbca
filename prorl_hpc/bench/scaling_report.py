"""report.md, summary.json and the plots of a series, made from its points alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.ablations import ablation_figures
from prorl_hpc.bench.figures import Figure, Machine, Report
from prorl_hpc.bench.scaling_figures import (
    base_of,
    cautions,
    commits,
    efficiency,
    efficiency_error,
    of_nodes,
    series_figures,
    spread,
    uncertain,
)
from prorl_hpc.bench.scaling_paper import ablations_table, differences, nodes_table
from prorl_hpc.bench.scaling_plots import draw_plots
from prorl_hpc.bench.scaling_records import REPORT_FILE, SUMMARY_FILE, PointResult, Series
from prorl_hpc.bench.scaling_simulated import SimulatedSeries
from prorl_hpc.bench.scaling_tables import (
    failed_table,
    measured,
    own_settings,
    rates_table,
    set_up_table,
    simulated_section,
    times_table,
    use_table,
)
from prorl_hpc.messages.codec import read_json

PLOTS = "plots"
_PLACES = {
    "local": "all nodes are processes of one machine",
    "slurm": "nodes of a Slurm cluster",
    "private": "a Slurm cluster of its own on one machine, whose nodes share its CPUs",
}
_METHOD = """\
- **Rate**: rollouts per second that the fullest pool gets through, from the end of the first tenth of all to the end of
  the last and not after the last RUN began: without filling up and running dry; the simulator's is the same.
- **Tool call beyond its sleep**: mean time of a tool call less what its command was told to sleep.
- **Efficiency** at N nodes: (rate at N / N) / (rate at m / m), m the smallest node count that was measured.
- **± x %**: relative standard error of a rate: how far another order of the same rollouts would move it, since only some lie
  in the steady time; from how unequally long those held a slot of the fullest pool, how many they were, and of how many. Of
  an efficiency: from both of its rates. It does not know of a machine that was slower for a while.
- All rollouts of a point are ordered at its start, so the wait for INIT is the time in that queue: it says how many
  were ordered, not that something is slow.
- Sandboxes and tool calls are real processes; their commands sleep. With the scripted engine the model's turns take
  the time that its latency model says, and no GPU works.
- **Engine busy**: share of moments in which an LLM server had at least one request. **Trainer busy**: share of the run
  in its (pretended) training. **Coordinator**: its CPU time, of one CPU."""


class Summary(msgspec.Struct, frozen=True):
    """summary.json."""

    report: Report
    series: Series
    results: list[PointResult]
    simulated: SimulatedSeries | None


def write_report(
    folder: Path,
    series: Series,
    results: Sequence[PointResult],
    simulated: SimulatedSeries | None = None,
    *,
    not_simulated: str = "",
) -> Report:
    """Write report.md, summary.json and plots/ into ``folder``; returns the figures. Points without a result are told
    as not measured, and why a simulation that was asked for could not be made (``not_simulated``). May be called again at
    any time."""
    figures = [*series_figures(series.points, results, simulated, not_simulated), *ablation_figures(results)]
    report = _report(series, results, figures)
    drawn = draw_plots(folder / PLOTS, results, simulated)
    text = "\n\n".join(_sections(series, results, simulated or not_simulated, report, drawn))
    _write(folder / REPORT_FILE, (text + "\n").encode())
    summary = Summary(report, series, list(results), simulated)
    _write(folder / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return report


def _report(series: Series, results: Sequence[PointResult], figures: Sequence[Figure]) -> Report:
    """As of when the series began, and with the code that its points ran."""
    written = Report.of(series.machine or Machine.here(), figures)
    began = next((result.date for result in results if result.date), written.date)
    return msgspec.structs.replace(written, commit=", ".join(commits(results)) or written.commit, date=began)


def simulated_before(folder: Path, results: Sequence[PointResult]) -> SimulatedSeries | None:
    """What the report of before has, if it was simulated from the same points."""
    try:
        summary = read_json(folder / SUMMARY_FILE, Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError):  # damaged: it is written anew
        return None
    return summary.simulated if summary is not None and of_nodes(summary.results) == of_nodes(results) else None


def _write(path: Path, content: bytes) -> None:
    """Whoever reads it meanwhile finds the whole old one or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _sections(
    series: Series,
    results: Sequence[PointResult],
    simulated: SimulatedSeries | str | None,
    report: Report,
    drawn: dict[str, str],
) -> Iterator[str]:
    def plots(*names: str) -> str:
        return "".join(f"\n\n![{drawn[name]}]({PLOTS}/{name}.png)\n\n{drawn[name]}." for name in names if name in drawn)

    yield "# Scaling of the rollout service"
    yield f"Asked for by `{shlex.join(series.command)}`; {series.place}: {_PLACES.get(series.place, series.place)}."
    yield "\n".join(_headlines(results, simulated))
    if failed := failed_table(series.points, results):
        yield f"## Points without a rate\n\n{failed}"
    yield _set_up(series, results)
    if of_nodes(results):
        yield f"## Rollouts per second\n\n{rates_table(results)}{plots('scaling')}"
    if simulated:
        told = f"It could not be made: {simulated}" if isinstance(simulated, str) else simulated_section(simulated)
        yield f"## Simulated continuation\n\n{told}"
    if measured(results):
        yield f"## How busy each part was\n\n{use_table(results)}{plots('utilisation', 'busy')}"
        times = f"Mean (median, 99th percentile).\n\n{times_table(results)}"
        yield f"## Times\n\n{times}{plots('waits', 'batches')}"
    if beside := [table for make in _BESIDE if (table := make(results))]:
        yield "\n\n".join(["## Beside the seed's published figures", *beside, differences()])
    yield f"## Figures\n\n{'Ordered from' if series.place == 'slurm' else 'Measured on'}: {report.markdown()}"
    yield f"## How it is measured\n\n{_METHOD}"


def _set_up(series: Series, results: Sequence[PointResult]) -> str:
    if not results:
        return "Nothing was measured yet."
    own = own_settings(series)
    given = f"`{own}`, over those of workload and ablations" if own else "none"
    return f"## Set-up\n\nSettings of the runs that the command gave: {given}.\n\n{set_up_table(results)}"


_BESIDE: tuple[Callable[[Sequence[PointResult]], str], ...] = (nodes_table, ablations_table)


def _headlines(results: Sequence[PointResult], simulated: SimulatedSeries | str | None) -> Iterator[str]:
    """The engine first: nobody shall take a scripted engine's tokens for a GPU's. Last what makes a point's figures other than
    they seem."""
    engines = sorted({result.engine for result in results if result.engine})
    yield f"- Engine: {'; '.join(engines) or 'not known yet'}."
    base, points = base_of(results), of_nodes(results)
    if base is not None and points[-1] is not base:
        last, share = points[-1], efficiency(points[-1], base)
        reached = f"**{share:.3f}**" if share is not None else f"not known: the point {last.state.value}"
        if known := uncertain(last, base) or spread(efficiency_error(last, base)):
            reached += f", {known}"
        yield f"- Efficiency at {last.spec.nodes:,} nodes, against {base.spec.nodes:,}: {reached}."
    if isinstance(simulated, str) and simulated:
        yield "- Simulated: **could not be made**, see below."
    elif isinstance(simulated, SimulatedSeries):
        yield f"- Simulated: {simulated.conclusion if simulated.valid else f'**not valid**: {simulated.why}'}"
    if len(at := commits(results)) > 1:
        told = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in at.items())
        yield f"- **Mind the commits**: the points were measured with different code ({told})."
    for result in measured(results):
        yield from (f"- **Mind {result.spec.name}**: {words}." for words in cautions(result))
