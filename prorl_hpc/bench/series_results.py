"""``results.parquet`` of a series: every rollout of every point, those of run directories that are gone too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.point_measures import ROLLOUT_SCHEMA, rollout_table
from prorl_hpc.bench.scaling_records import RESULTS_FILE, PointResult
from prorl_hpc.config.run_directory import RunDirectoryError
from prorl_hpc.messages.errors import ProrlError

SCHEMA = ROLLOUT_SCHEMA.append(pa.field("run", pa.string()))
"""``run``: the name of the run directory, for a point may have been measured more than once."""


def write_results(folder: Path, results: Sequence[PointResult], say: Say) -> None:
    """Rows that an earlier file has of a run stay where the run has fewer of them by now, or cannot be read."""
    file = folder / RESULTS_FILE
    before = _before(file, say)
    rows = pa.concat_tables([SCHEMA.empty_table(), *(_rows(result, before, file, say) for result in results)])
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        pq.write_table(rows, part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _before(file: Path, say: Say) -> pa.Table:
    """What was written last time, a column that it lacks as null. What is there and cannot be read is put aside."""
    if not file.exists():
        return SCHEMA.empty_table()
    try:
        read = pq.read_table(file, partitioning=None)
        columns = [read[f.name] if f.name in read.column_names else pa.nulls(len(read), f.type) for f in SCHEMA]
        return pa.table(columns, names=SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowException, OSError) as error:
        aside = file.with_name(f"{file.name}.damaged")
        file.replace(aside)
        say(f"{file} cannot be read ({error}): it is kept as {aside.name}, and written anew from the runs")
        return SCHEMA.empty_table()


def _rows(result: PointResult, before: pa.Table, file: Path, say: Say) -> pa.Table:
    run, why = Path(result.run_dir).name, ""
    try:
        now = rollout_table([result])
    except (
        ProrlError,
        RunDirectoryError,
        msgspec.MsgspecError,
        UnicodeDecodeError,
        OSError,
        pa.ArrowException,
    ) as error:
        now, why = ROLLOUT_SCHEMA.empty_table(), f" cannot be read: {error}"
    now = now.append_column("run", pa.array([run] * now.num_rows, pa.string()))
    same_run = pc.fill_null(pc.equal(before["run"], run), True)  # null: before there was that column
    kept = before.filter(pc.and_(pc.equal(before["point"], result.spec.name), same_run))
    why = why or (" is gone" if result.run_dir and not Path(result.run_dir).is_dir() else "")
    if kept.num_rows > now.num_rows:
        why = why or f" has only {now.num_rows} rollouts by now"
        say(f"{result.spec.name}: its run {result.run_dir}{why}. Its {kept.num_rows} rollouts stay in {file.name}")
        return kept
    if why:
        say(f"{result.spec.name}: its run {result.run_dir}{why}. No rollout of it is in {file.name}")
    return now
