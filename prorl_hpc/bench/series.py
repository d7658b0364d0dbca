"""Measures the points of a series one after the other, or several at once, and keeps each as it ends.

A series that was interrupted goes on with the points that have no result: whose run is still under way is waited for,
the others are launched. A point that failed has a result that says so; it is measured again only when that is asked for.
"""

from __future__ import annotations

import time
from pathlib import Path

from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.scaling_records import SERIES_FILE, PointResult, PointSpec, PointState, Series, point_file
from prorl_hpc.bench.series_folder import read_result, run_note
from prorl_hpc.bench.series_launch import compose_points, engine_words, launch_point, workload_words
from prorl_hpc.bench.series_point import RunningPoint
from prorl_hpc.cli.composition import Composed
from prorl_hpc.cli.following import ignore_signals
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError, RunError

LOOK_S = 0.5


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
        except OSError:
            self._stop("bench scaling cannot write its folder")
            raise

    def _is_left(self, spec: PointSpec, again: bool) -> bool:
        result = read_result(self._folder, spec)
        if result is not None and result.state is not PointState.DONE and not again:
            self._say(f"{spec.name}: {result.state.value.replace('_', ' ')}, and not measured again: {result.why}")
        return result is None or (again and result.state is not PointState.DONE)

    def _take_up(self) -> None:
        """Wait for runs that an interrupted series has left under way."""
        for spec in [*self._left]:
            noted = run_note(self._folder, spec)
            if not noted.exists() or self._series.place == "private":  # that cluster has ended with its series
                continue
            try:
                self._under_way.append(running := _noted(noted, spec))
            except (RunDirectoryError, RunError) as error:  # removed, never submitted, or damaged
                self._say(f"{spec.name}: started anew, for the run that it had cannot be waited for: {error}")
                continue
            self._left.remove(spec)
            self._say(f"{spec.name}: goes on with {running.run.path}")

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
        run_note(self._folder, result.spec).unlink(missing_ok=True)
        figures = result.figures
        rate = f"{figures.steady_per_s:.3g} rollouts/s, {figures.done} done" if figures is not None else result.why
        self._say(f"{result.spec.name}: {result.state.value.replace('_', ' ')}: {rate}")

    def _stop(self, reason: str) -> None:
        ignore_signals()
        for running in self._under_way:
            running.stop(reason)
            run_note(self._folder, running.spec).unlink(missing_ok=True)

    def _leave(self) -> None:
        if self._series.place != "slurm":
            self._stop("bench scaling was told to end")
            return
        for running in self._under_way:
            self._say(
                f"{running.spec.name}: {running.job.description} goes on, and is waited for when the series goes on"
            )


def _noted(file: Path, spec: PointSpec) -> RunningPoint:
    """The run that ``file`` names. Raises RunError or RunDirectoryError."""
    try:
        named = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{file} cannot be read ({error}); `prorl-hpc status` shows whether it still runs") from error
    if not named:
        raise RunError(f"{file} is empty; `prorl-hpc status` shows whether it still runs")
    return RunningPoint(spec, RunDirectory.open(named))


def _note_run(folder: Path, spec: PointSpec, run: RunDirectory) -> None:
    file = run_note(folder, spec)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{run.path}\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
