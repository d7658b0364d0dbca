"""The tables of report.md: what was measured at each point, in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from prorl_hpc.bench.scaling_figures import (
    base_of,
    efficiency,
    efficiency_error,
    of_nodes,
    spread,
    steady,
    steady_error,
    why_no_rate,
)
from prorl_hpc.bench.scaling_records import PointResult, PointSpec, PointState, Series, Times
from prorl_hpc.bench.scaling_settings import SETTINGS
from prorl_hpc.bench.scaling_simulated import Check, SimulatedSeries

NONE = "–"
_STAGES = ("init", "run", "eval")
_POOLS = {"init": "INIT", "ready": "READY (fill)", "run": "RUN", "eval": "EVAL"}
_COUPLED = {"coupled": "held (coupled)"}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells may hold anything but are one line each."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def rates_table(results: Sequence[PointResult]) -> str:
    """One line a point of the scaling series; a point that failed says so in place of its rate."""
    base = base_of(results)
    head = ("nodes", "state", "rollouts/s", "efficiency", "turns/s", "tokens/s", "done", "not done", "whole run")
    return markdown_table(head, (_rate_row(result, base) for result in of_nodes(results)))


def _rate_row(result: PointResult, base: PointResult | None) -> tuple[str, ...]:
    nodes, state, figures = f"{result.spec.nodes}", _state(result), result.figures
    if result.state is not PointState.DONE or figures is None:
        return (nodes, state, *[NONE] * 7)
    return (
        nodes,
        state,
        f"{_number(steady(result))} {spread(steady_error(result))}".strip(),
        f"{_number(efficiency(result, base), '.3f')} {spread(efficiency_error(result, base))}".strip(),
        _number(figures.turns_per_s),
        _number(figures.generated_tokens_per_s),
        f"{figures.done:,}",
        f"{figures.not_done:,}",
        f"{figures.seconds:,.0f} s",
    )


def use_table(results: Sequence[PointResult]) -> str:
    """How busy each part was."""
    pools = dict(_POOLS)
    if any("coupled" in result.figures.utilisation for result in measured(results) if result.figures):
        pools |= _COUPLED
    head = ("point", *pools.values(), "engine busy", "requests per server", "prefix hits", "trainer busy",
            "coordinator")  # fmt: skip
    rows = []
    for result in measured(results):
        figures = result.figures
        assert figures is not None
        shares = [_percent(figures.utilisation.get(pool)) for pool in pools]
        busy = None if figures.coordinator_s is None else figures.coordinator_s * figures.per_s
        requests, hits = _number(figures.engine_requests, ".1f"), _percent(figures.prefix_hit_rate)
        rows.append((result.spec.name, *shares, _percent(figures.engine_busy), requests, hits,
                     _percent(figures.trainer_busy), _percent(busy)))  # fmt: skip
    return markdown_table(head, rows)


def times_table(results: Sequence[PointResult]) -> str:
    """Waits and busy times of the stages."""
    head = ("point", *(f"wait for {stage.upper()}" for stage in _STAGES), *(f"in {stage.upper()}" for stage in _STAGES),
            "tool call beyond its sleep")  # fmt: skip
    rows = []
    for result in measured(results):
        figures = result.figures
        assert figures is not None
        waits = [_times(figures.waits.get(stage)) for stage in _STAGES]
        stages = [_times(figures.stages.get(stage)) for stage in _STAGES]
        tool = NONE if figures.tool_call_s is None else f"{1000 * figures.tool_call_s:.1f} ms"
        rows.append((result.spec.name, *waits, *stages, tool))
    return markdown_table(head, rows)


def failed_table(planned: Sequence[PointSpec], results: Sequence[PointResult]) -> str:
    """Points without a rate, and why; empty if there is none."""
    found = {result.spec.name: result for result in results}
    rows = []
    for spec in planned:
        result = found.get(spec.name)
        if result is None:
            rows.append((spec.name, "not measured", "the series was interrupted: the same command goes on with it", ""))
        elif why := why_no_rate(result):
            rows.append((spec.name, _state(result), result.why or why, result.run_dir))
    return markdown_table(("point", "state", "what happened", "run"), rows) if rows else ""


def own_settings(series: Series) -> str:
    """The settings of the runs that the command gave, in Hydra's words; empty if there are none."""
    words = [word for word in series.command if "=" in word and not word.startswith("-")]
    return shlex.join(word for word in words if word.partition("=")[0] not in SETTINGS)


def measured(results: Sequence[PointResult]) -> list[PointResult]:
    """All points that are done, ablations too."""
    return [result for result in results if result.state is PointState.DONE and result.figures is not None]


def _state(result: PointResult) -> str:
    return result.state.value if result.state is PointState.DONE else f"**{result.state.value.replace('_', ' ')}**"


def _number(value: float | None, form: str = ".4g") -> str:
    return NONE if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def _times(times: Times | None) -> str:
    return NONE if times is None else f"{times.mean:.3g} s ({times.p50:.3g}, {times.p99:.3g})"


def set_up_table(results: Sequence[PointResult]) -> str:
    """What each point was: workload, engine, size, load, date, run."""
    rows = []
    for result in results:
        spec, load = result.spec, result.spec.load
        if load.batches:
            ordered = f"{load.batches} batches of {load.groups} × {load.group_size}, refill {load.refill.value}"
        else:
            ordered = f"{load.rollouts:,} rollouts"
        rows.append(
            (
                spec.name,
                f"{spec.nodes:,}",
                result.workload,
                result.engine,
                ordered,
                result.date,
                result.commit,
                result.run_dir,
            )
        )
    return markdown_table(("point", "nodes", "workload", "engine", "ordered", "began", "commit", "run"), rows)


def _check_row(check: Check, base: Check) -> tuple[str, ...]:
    def per_node(one: Check, rate: float) -> float:
        return rate / one.nodes

    return (
        f"{check.nodes:,}",
        f"{check.measured_per_s:.4g}/s",
        f"{check.foretold_per_s:.4g}/s",
        f"{100 * check.error:+.1f} %",
        f"{check.replayed_per_s:.4g}/s",
        f"{100 * check.replay_error:+.1f} %",
        f"{per_node(check, check.measured_per_s) / per_node(base, base.measured_per_s):.3f}",
        f"{per_node(check, check.foretold_per_s) / per_node(base, base.foretold_per_s):.3f}",
    )


def simulated_section(simulated: SimulatedSeries) -> str:
    """The proof first, then the continuation, or why there is none to trust."""
    head = ("nodes", "measured", "foretold", "error", "replayed", "error", "efficiency measured", "without any loss")
    checks = markdown_table(head, (_check_row(check, simulated.checks[0]) for check in simulated.checks))
    verdict = simulated.conclusion if simulated.valid else f"**The continuation is not valid.** {simulated.why}"
    points = markdown_table(
        (
            "nodes",
            "rollouts",
            "rollouts/s",
            "efficiency",
            "RUN in use (whole run)",
            "wait for RUN, mean",
            "coordinator (of it heartbeats)",
        ),
        (
            (
                f"{point.nodes:,}",
                f"{point.rollouts:,}",
                f"{point.per_s:.4g}",
                f"{point.efficiency:.3f}",
                _percent(point.utilisation.get("run")),
                f"{point.waits['run'].mean:.3g} s" if "run" in point.waits else NONE,
                f"{_percent(point.coordinator_busy)} ({_percent(simulated.coordinator.at_rest(point.nodes))})",
            )
            for point in simulated.points
        ),
    )
    where = (
        "The efficiency of a simulated size is against the smallest measured size, simulated with as many rollouts a node. Where "
        "these are more than were measured, filling up and running dry weigh less: their rates a node may be above the "
        "measured ones."
    )
    return "\n\n".join(
        [
            f"The service's own scheduler under a virtual clock, with stage times recorded at "
            f"{', '.join(simulated.fitted_from)}. Coordinator: {simulated.coordinator.how}. Foretold: from the stage "
            "times of the other points alone; replayed: from the point's own. Without any loss: the efficiency of the "
            "foretold rates, which a short series of uneven rollouts keeps off 1 whatever runs it. Not in the model: the "
            "network, shared storage, Slurm itself, and the memory of one coordinator.",
            "The cost is that of a coordinator which is never idle. At a few rollouts a second it wakes up for every message by "
            "itself, which takes some milliseconds of CPU for a rollout and less the higher the rate: so the shares of "
            "the measured points, in the table below, are larger than simulated ones of the same rate, and say nothing of the limit.",
            checks,
            verdict,
            f"{where}\n\n{points}" if simulated.points else "No further size was asked for.",
        ]
    )
