"""Measures the points of a series one after the other, or several at once, and keeps each as it ends.

A series that was interrupted goes on with the points that have no result: whose run is still under way is waited for,
the others are launched. A point that failed has a result that says so; it is measured again only when that is asked for.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.scaling_records import (
    RESULTS_FILE,
    SERIES_FILE,
    PointResult,
    PointSpec,
    PointState,
    Series,
    point_file,
)
from prorl_hpc.bench.series_launch import compose_points, engine_words, launch_point, workload_words
from prorl_hpc.bench.series_point import RunningPoint
from prorl_hpc.cli.composition import Composed
from prorl_hpc.cli.following import ignore_signals
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ConfigError, RunError

LOOK_S = 0.5


def check_folder(folder: Path, series: Series) -> None:
    """Raises ConfigError unless ``series`` can be measured into ``folder``: a new one, or the one that is there already,
    whatever it was called with."""
    there = read_json(folder / SERIES_FILE, Series)
    if there is not None and (there.place, there.points) != (series.place, series.points):
        raise ConfigError(
            f"out={folder} holds another series: `{shlex.join(there.command)}`, place: {there.place}. Name another folder, "
            f"or go on with that one: `prorl-hpc bench scaling out={folder}`"
        )
    if there is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={folder} is there and holds no series: name a folder that is new or empty")


def read_series(folder: Path) -> tuple[Series, list[PointResult]]:
    """With the results that are there, in the order of the points. Raises ConfigError if the folder holds no series."""
    series = read_json(folder / SERIES_FILE, Series)
    if series is None:
        raise ConfigError(f"{folder} holds no series: it has no {SERIES_FILE}, which `prorl-hpc bench scaling` writes")
    found = [read_json(point_file(folder, spec.name), PointResult) for spec in series.points]
    return series, [result for result in found if result is not None]


class SeriesRun:
    """``at_once``: so many points are under way at most. ``again``: points that failed are measured once more."""

    def __init__(self, folder: Path, series: Series, say: Say, *, at_once: int = 1, again: bool = False) -> None:
        self._folder, self._series, self._say, self._at_once = folder.absolute(), series, say, at_once
        self._left = [spec for spec in series.points if self._is_left(spec, again)]
        self._under_way: list[RunningPoint] = []

    def run(self) -> None:
        """Until every point has a result. Raises ConfigError before anything is started. When it is interrupted, runs
        under way are stopped, but a signal other than Ctrl-C leaves those of a cluster alone."""
        composed = compose_points(self._left, self._series.place, self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / SERIES_FILE).exists():
            write_json(self._folder / SERIES_FILE, self._series)
        entries = dict(zip((spec.name for spec in self._left), composed, strict=True))
        self._say(f"{len(self._left)} of {len(self._series.points)} points are to be measured, into {self._folder}")
        try:
            self._take_up()
            while self._left or self._under_way:
                while self._left and len(self._under_way) < self._at_once:
                    spec = self._left.pop(0)
                    self._start(spec, entries[spec.name])
                self._look()
        except KeyboardInterrupt:
            self._stop("Ctrl-C in bench scaling")
            raise
        except SystemExit:
            self._leave()
            raise

    def _is_left(self, spec: PointSpec, again: bool) -> bool:
        result = read_json(point_file(self._folder, spec.name), PointResult)
        return result is None or (again and result.state is not PointState.DONE)

    def _take_up(self) -> None:
        """Wait for runs that an interrupted series has left under way."""
        for spec in [*self._left]:
            noted = _run_note(self._folder, spec)
            if not noted.exists() or self._series.place == "private":  # that cluster has ended with its series
                continue
            with contextlib.suppress(RunDirectoryError, RunError):  # removed, or never submitted
                run = RunDirectory.open(noted.read_text().strip())
                self._under_way.append(RunningPoint(spec, run))
                self._left.remove(spec)
                self._say(f"{spec.name}: goes on with {run.path}")

    def _start(self, spec: PointSpec, entry: Composed) -> None:
        number = 1 + [point.name for point in self._series.points].index(spec.name)
        self._say(f"{spec.name}: point {number} of {len(self._series.points)}")
        try:
            run = launch_point(spec, entry, lambda run: _note_run(self._folder, spec, run))
        except (ConfigError, RunError) as error:
            words = engine_words(entry.config), workload_words(entry.config, spec.overrides)
            self._keep(PointResult(spec, PointState.FAILED, str(error), "", *words, _now(), None))
            return
        self._under_way.append(RunningPoint(spec, run))

    def _look(self) -> None:
        for running in [*self._under_way]:
            if running.over():
                self._under_way.remove(running)
                self._keep(running.result())
            elif told := running.news():
                self._say(told)
        if self._under_way:
            time.sleep(LOOK_S)

    def _keep(self, result: PointResult) -> None:
        file = point_file(self._folder, result.spec.name)
        file.parent.mkdir(exist_ok=True)
        write_json(file, result)
        _run_note(self._folder, result.spec).unlink(missing_ok=True)
        figures = result.figures
        rate = f"{figures.steady_per_s:.3g} rollouts/s, {figures.done} done" if figures is not None else result.why
        self._say(f"{result.spec.name}: {result.state.value.replace('_', ' ')}: {rate}")

    def _stop(self, reason: str) -> None:
        ignore_signals()
        for running in self._under_way:
            running.stop(reason)
            _run_note(self._folder, running.spec).unlink(missing_ok=True)

    def _leave(self) -> None:
        if self._series.place != "slurm":
            self._stop("bench scaling was told to end")
            return
        for running in self._under_way:
            self._say(
                f"{running.spec.name}: {running.job.description} goes on, and is waited for when the series goes on"
            )


def write_results(folder: Path, results: Sequence[PointResult]) -> None:
    """``results.parquet``: every rollout of every point."""
    import pyarrow.parquet as pq

    from prorl_hpc.bench.point_measures import rollout_table

    pq.write_table(rollout_table(results), folder / RESULTS_FILE)


def _run_note(folder: Path, spec: PointSpec) -> Path:
    return folder / "points" / f"{spec.name}.run"


def _note_run(folder: Path, spec: PointSpec, run: RunDirectory) -> None:
    file = _run_note(folder, spec)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{run.path}\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
