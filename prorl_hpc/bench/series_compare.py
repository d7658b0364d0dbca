"""Series and runs side by side: the same figures of each, against the first, and what differs in their set-up."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from prorl_hpc.bench.figures import commit_of_run
from prorl_hpc.bench.point_measures import measure
from prorl_hpc.bench.scaling_figures import base_of, efficiency, steady, why_no_rate
from prorl_hpc.bench.scaling_records import (
    ORDER_FILE,
    SERIES_FILE,
    LoadOrder,
    PointFigures,
    PointResult,
    PointSpec,
    read_record,
)
from prorl_hpc.bench.scaling_tables import NONE, markdown_table
from prorl_hpc.bench.series_folder import read_series
from prorl_hpc.bench.settings_compare import flat, settings_that_differ
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Status
from prorl_hpc.observe.rollout_store import read_rollouts

_SETTINGS, _COMMIT = "settings", "commit"
RUN = "run"
"""The point of a run that is compared by itself."""
UNITS = {
    "rollouts/s": "/s",
    "efficiency": "×",
    "time to a batch": "s",
    "turns/s": "/s",
    "tokens/s": "/s",
    "RUN slots in use": "%",
    "engine busy": "%",
    "prefix-cache hits": "%",
    "wait for RUN": "s",
    "in INIT": "s",
    "in RUN": "s",
    "in EVAL": "s",
    "tool call beyond its sleep": "s",
    "coordinator a rollout": "s",
    "done": "",
    "not done": "",
}
"""Every figure that is compared, in the order of the table. Times are means."""
_SHORT_S = 0.1
"""A ratio to a time below this is not told, for it may be great and mean nothing: the difference is."""
_DECIMALS = {"%": 2}


class Point(msgspec.Struct, frozen=True):
    """``why``: why it has no figures. ``set_up``: what must be alike for the figures to be comparable."""

    name: str
    set_up: dict[str, str]
    numbers: dict[str, float | None]
    why: str = ""


class Side(msgspec.Struct, frozen=True):
    """What was named: the folder of a series or a run directory."""

    label: str
    path: str
    points: list[Point]

    def point(self, name: str) -> Point | None:
        return next((point for point in self.points if point.name == name), None)


class Line(msgspec.Struct, frozen=True):
    """``ratios``: of each side after the first to the first; None, too, for a time so short that a ratio to it says nothing."""

    point: str
    figure: str
    unit: str
    values: list[float | None]
    ratios: list[float | None]


class SideBySide(msgspec.Struct, frozen=True):
    """``differences`` are sentences: of the set-ups of points with the same name, of points that failed, and of those that
    not every side has."""

    sides: list[Side]
    lines: list[Line]
    differences: list[str]

    def markdown(self) -> str:
        rows = [_cells(line) for line in self.lines]
        parts = [markdown_table(_head(self.sides), rows), *(f"- {words}" for words in self.differences)]
        return "\n\n".join([parts[0], "\n".join(parts[1:])]) if self.differences else parts[0]

    def table(self) -> Table:
        """For a terminal; the differences are told below it, by whoever shows it."""
        table = Table(box=box.SIMPLE_HEAD)
        for number, title in enumerate(_head(self.sides)):
            table.add_column(title, justify="left" if number < 2 else "right", overflow="fold")
        before = ""
        for line in self.lines:
            if before and line.point != before:
                table.add_section()
            point, *cells = _cells(line)
            table.add_row("" if line.point == before else point, *cells)
            before = line.point
        return table


def compare(paths: Sequence[Path]) -> SideBySide:
    """Raises ConfigError for fewer than two, for what is neither a series nor a run, and if there is nothing that two
    sides have in common."""
    sides = [_side(path, label) for path, label in zip(paths, _labels(paths), strict=True)]
    if len(sides) < 2:
        raise ConfigError("give two or more folders of series, or run directories, to compare")
    names = list(dict.fromkeys(point.name for side in sides for point in side.points))
    lines = [line for name in names for line in _lines(name, sides)]
    if not lines:
        held = "; ".join(f"{side.label}: {', '.join(map(_held, side.points)) or 'nothing'}" for side in sides)
        raise ConfigError(
            f"no two of these have a measured point of the same name in common ({held}): nothing to compare"
        )
    return SideBySide(sides, lines, [words for name in names for words in _differences(name, sides)])


def _held(point: Point) -> str:
    return f"{point.name} has no figures ({point.why})" if point.why else point.name


def _labels(paths: Sequence[Path]) -> list[str]:
    """Their last names, or as much of the path as tells them apart."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise ConfigError(f"{paths[0]} is named twice: name two different folders to compare")


def _side(path: Path, label: str) -> Side:
    if (path / SERIES_FILE).exists():
        _, results = read_series(path)
        base = base_of(results)
        return Side(label, str(path), [_of_result(result, efficiency(result, base)) for result in results])
    try:
        run = RunDirectory.open(path, to_read=True)
    except RunDirectoryError as error:
        raise ConfigError(
            f"{path} is neither the folder of a series (it has no {SERIES_FILE}) nor a run directory: {error}"
        ) from error
    return Side(label, str(path), [_of_run(run)])


def _of_result(result: PointResult, reached: float | None) -> Point:
    set_up = {"engine": result.engine, "workload": result.workload, "load": _load(result.spec.load)}
    set_up[_SETTINGS] = "\n".join(result.spec.overrides)
    if result.commit:
        set_up[_COMMIT] = result.commit
    if result.figures is None or steady(result) is None:
        return Point(result.spec.name, set_up, {}, why_no_rate(result))
    return Point(result.spec.name, set_up, {**_numbers(result.figures), "efficiency": reached})


def _of_run(run: RunDirectory) -> Point:
    """A run of a series with the load process's record; of any other what its rollouts say."""
    config = run.load_config()
    settings = [f"{name}={value}" for name, value in flat(dataclasses.asdict(config)) if not name.startswith("run.")]
    set_up = {"engine": config.engine.kind, "task": config.task.name, _SETTINGS: "\n".join(settings)}
    if commit := commit_of_run(run.path):
        set_up[_COMMIT] = commit
    record, order = read_record(run.path), read_json(run.path / ORDER_FILE, LoadOrder)
    if record is None or order is None:
        return Point(RUN, set_up, _of_rollouts(run))
    figures = measure(run, record, PointSpec(run.run_id, 1, [], order))
    return Point(RUN, {**set_up, "load": _load(order)}, _numbers(figures))


def _load(load: LoadOrder) -> str:
    if not load.batches:
        return f"{load.rollouts} rollouts"
    return f"{load.batches} batches of {load.groups} × {load.group_size}, refill {load.refill.value}"


def _numbers(figures: PointFigures) -> dict[str, float | None]:
    def percent(share: float | None) -> float | None:
        return None if share is None else 100 * share

    return {
        "rollouts/s": figures.steady_per_s or None,
        "time to a batch": statistics.fmean(figures.batch_s) if figures.batch_s else None,
        "turns/s": figures.turns_per_s,
        "tokens/s": figures.generated_tokens_per_s,
        "RUN slots in use": percent(figures.utilisation.get("run")),
        "engine busy": percent(figures.engine_busy),
        "prefix-cache hits": percent(figures.prefix_hit_rate),
        "wait for RUN": figures.waits["run"].mean if "run" in figures.waits else None,
        **{f"in {stage.upper()}": times.mean for stage, times in figures.stages.items()},
        "tool call beyond its sleep": figures.tool_call_s,
        "coordinator a rollout": figures.coordinator_s,
        "done": figures.done,
        "not done": figures.not_done,
    }


def _of_rollouts(run: RunDirectory) -> dict[str, float | None]:
    """Of a run without a load process: its rate is that while batches were open, since nothing tells of the time between."""
    rows = read_rollouts(run, ["status", "timings", "batch_id", "batch_elapsed_s"]).to_pylist()
    done = [row for row in rows if row["status"] == Status.DONE]
    if not done:
        raise ConfigError(f"{run.path} has no rollout that is done, so there is nothing to compare")
    batches = {row["batch_id"]: row["batch_elapsed_s"] for row in rows if row["batch_elapsed_s"] is not None}
    in_batches = sum(row["batch_elapsed_s"] is not None for row in done)
    open_s = sum(batches.values())
    return {
        "rollouts/s": in_batches / open_s if open_s else None,
        "time to a batch": statistics.fmean(batches.values()) if batches else None,
        "wait for RUN": _mean(done, "run", "queued_s"),
        **{f"in {stage.upper()}": _mean(done, stage, "busy_s") for stage in ("init", "run", "eval")},
        "done": len(done),
        "not done": len(rows) - len(done),
    }


def _mean(rows: Sequence[dict[str, Any]], stage: str, what: str) -> float | None:
    values = [timing[what] for row in rows for timing in row["timings"] if timing["stage"] == stage]
    return statistics.fmean(values) if values else None


def _lines(name: str, sides: Sequence[Side]) -> list[Line]:
    """Figures that at least two sides have."""
    points = [side.point(name) for side in sides]
    lines = []
    for figure, unit in UNITS.items():
        values = [None if point is None else point.numbers.get(figure) for point in points]
        if sum(value is not None for value in values) < 2:
            continue
        first = values[0]
        base = None if first is None or _is_short(first, unit) else first
        ratios = [value / base if value is not None and base else None for value in values[1:]]
        lines.append(Line(name, figure, unit, values, ratios))
    return lines


def _differences(name: str, sides: Sequence[Side]) -> list[str]:
    there = [(side, point) for side in sides if (point := side.point(name)) is not None]
    missing = [side.label for side in sides if side.point(name) is None]
    found = [f"{name}: not in {', '.join(missing)}"] if missing else []
    found += [f"{name}: {side.label} has no figures: {point.why}" for side, point in there if point.why]
    first_side, first = there[0]
    for side, point in there[1:]:
        for what in (what for what in first.set_up if what in point.set_up):
            mine, other = first.set_up[what], point.set_up[what]
            pairs = settings_that_differ(mine, other) if what == _SETTINGS else {what: (mine, other)}
            found += [
                f"{name}: not the same {each}: {first_side.label}: {one}; {side.label}: {two}"
                for each, (one, two) in pairs.items()
                if one != two
            ]
    return found


def _is_short(seconds: float, unit: str) -> bool:
    return unit == "s" and seconds < _SHORT_S


def _head(sides: Sequence[Side]) -> list[str]:
    first = sides[0].label
    return ["point", "figure", *(side.label for side in sides), *(f"{side.label} / {first}" for side in sides[1:])]


def _cells(line: Line) -> list[str]:
    values = [NONE if value is None else _value_words(value, line.unit) for value in line.values]
    first, *others = line.values
    against = [_against(first, *pair, line.unit) for pair in zip(others, line.ratios, strict=True)]
    return [line.point, line.figure, *values, *against]


def _value_words(value: float, unit: str) -> str:
    if unit in _DECIMALS:
        return f"{value:.{_DECIMALS[unit]}f} {unit}"
    return f"{1000 * value:.3g} ms" if _is_short(value, unit) else f"{value:.4g} {unit}".strip()


def _against(first: float | None, value: float | None, ratio: float | None, unit: str) -> str:
    """The ratio; of a short time the difference."""
    if ratio is not None:
        return f"{ratio:.3f}"
    if first is None or value is None or not _is_short(first, unit):
        return NONE
    more = value - first
    return f"{1000 * more:+.2g} ms" if abs(more) < _SHORT_S else f"{more:+.3g} s"
