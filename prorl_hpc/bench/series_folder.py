"""The folder of a series: who is at it, and what its files say. One that is damaged is named, with what to do."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prorl_hpc.bench import disk_errors
from prorl_hpc.bench.scaling_records import SERIES_FILE, PointResult, PointSpec, PointState, Series, point_file
from prorl_hpc.config.run_lock import RunLock
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError

LOCK_FILE = "lock"
MODEL = "model"
"""The tokenizer of scripted engines, made for the series."""
KEPT = "conf"
"""The files of the user's groups that the series was composed of."""
_MADE_FIRST = (LOCK_FILE, MODEL, f".{MODEL}", KEPT)
"""Before there is a series."""
PLACES = ("local", "slurm", "private")


@contextlib.contextmanager
def only_here(folder: Path) -> Iterator[None]:
    """``folder``, made if it is not there, with nobody else at it; what was made goes again if no series came of it. Raises
    RunDirectoryError, which says who is at it, and ConfigError or RunError for a folder that cannot be written."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with disk_errors.told(f"out={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            before = {path.name for path in folder.iterdir()}
            lock = RunLock(folder / LOCK_FILE, f"the series in {folder}", "bench scaling", then="go on with it")
            lock.__enter__()
        try:
            yield
        finally:
            if not (folder / SERIES_FILE).exists():
                for name in {*_MADE_FIRST} - before:
                    _remove(folder / name)
            lock.release()
    finally:
        for path in absent:
            with contextlib.suppress(OSError):  # something is in it, or it was never made
                path.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_folder(folder: Path, series: Series) -> None:
    """Raises ConfigError unless ``series`` can be measured into ``folder``: a new one, or the one that is there already,
    whatever it was called with."""
    there = read_plan(folder)
    if there is not None and (there.place, there.points) != (series.place, series.points):
        raise ConfigError(
            f"out={folder} holds another series: `{shlex.join(there.command)}`, place: {there.place}. Name another folder, "
            f"or go on with that one: `prorl-hpc bench scaling out={folder}`"
        )
    if there is None and any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise ConfigError(f"out={folder} is there and holds no series: name a folder that is new or empty")


def read_plan(folder: Path) -> Series | None:
    """None if the folder holds no series. Raises ConfigError if what it holds cannot be understood."""
    file = folder / SERIES_FILE
    cure = "Put back a copy of it, or measure the series anew into another folder (out=)"
    try:
        series = read_json(file, Series)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}), so that it is not known what the series is. {cure}"
        ) from error
    if series is None:
        return None
    if series.place not in PLACES:
        raise ConfigError(f"{file}: place {series.place!r} is none; there are {', '.join(PLACES)}. {cure}")
    if not series.points:
        raise ConfigError(f"{file}: there are no points in it. {cure}")
    return series


def read_series(folder: Path) -> tuple[Series, list[PointResult]]:
    """With the results that are there, in the order of the points. Raises ConfigError if the folder holds no series."""
    series = read_plan(folder)
    if series is None:
        raise ConfigError(f"{folder} holds no series: it has no {SERIES_FILE}, which `prorl-hpc bench scaling` writes")
    found = [read_result(folder, spec) for spec in series.points]
    return series, [result for result in found if result is not None]


def read_result(folder: Path, spec: PointSpec) -> PointResult | None:
    """None before the point has ended. One that cannot be read is that of a failed point, so that it is told in the report
    and can be measured again."""
    file = point_file(folder, spec.name)
    try:
        return read_json(file, PointResult)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        why = (
            f"its result {file} cannot be read ({error}): put back a copy of it, or measure the point again: "
            f"`prorl-hpc bench scaling out={folder} --again`"
        )
        return PointResult(spec, PointState.FAILED, why, "", "", "", "", None)


def run_note(folder: Path, spec: PointSpec) -> Path:
    """Names the run directory of a point that is under way."""
    return folder / "points" / f"{spec.name}.run"
