"""Full trajectories on disk, one row per rollout: ``rollouts/<batch_id>.parquet``, and ``rollouts/single-<n>.parquet``
for those that belong to no finished batch (n: the first one's cursor). Each rollout is in one file.

Columns (T = tokens of the trajectory, S = its segments):

==================  ====================  =========================================================================
rollout_id          string                ``{batch_id}.g{row index}.s{sample}`` if a batch started it
batch_id            string                empty for one that was submitted by itself
batch_elapsed_s     float64, nullable     seconds from the batch's order to its end (the same in all its rows); null
                                          if there is no batch or it had not ended
group_id            string                joins the samples of one prompt
group_row           int32, nullable       the prompt's place in the supply of the batch that started it; null as above
group_outcome       string, nullable      accepted, uniform, broken, cancelled; null as above
carried_from        string                the batch that started the group, if that is not ``batch_id``
sample              int32                 counts the samples of a group from 0
row_id              string                the dataset row's ``id``
task                string
policy              string                the policy that generated it; of an order for ``any``, the one that was drawn
status              string                done, failed, timed_out, cancelled
reward              float64, nullable     verified reward; null unless done
failure_stage       string, nullable      init, run, eval; null also for a failure outside any stage
failure_kind        string, nullable      policy, task, sandbox, inference, infrastructure; null if it did not break
failure_message     string, nullable
metrics             map<string, float64>  the task's numbers for people
timings             list<struct>          {stage, queued_s, busy_s}: seconds waited for a slot, seconds spent in it
attempts            int32                 1 unless infrastructure faults made it start again
worker, server      string                who ran it, who generated for it; empty if it came to neither
cursor              int64, nullable       numbers the results of a run in the order in which they got onto disk
token_ids           list<int32>           length T
loss_mask           list<bool>            length T; true where the policy generated the token
logprobs            list<float32>         length T, nats, as the engine reported them; 0 where loss_mask is false
segment_lengths     list<int32>           length S, tokens; they add up to T
weight_versions     list<int32>           length S; null where the policy did not generate the segment
messages            list<struct>          {role, content, name, call_id, tool_calls, reasoning}: the conversation as
                                          text, for people; tool_calls: list<{name, arguments (JSON), call_id}>
truncated           bool                  a turn was cut at a token limit
finish              string                why the conversation ended: answer, malformed, turns, turn_tokens,
                                          rollout_tokens, context, stop_string, repetition, environment; or empty
branches            list<struct>          the columns from token_ids to finish of each further conversation (sub-agents,
                                          histories that an agent rewrote): samples of their own with this reward
==================  ====================  =========================================================================

The file's metadata has the version of this table (``prorl_rollouts``; files of version 1 lack ``carried_from`` and
``cursor``, those before 3 ``policy``, ``finish``, ``branches``, and all but role and content of ``messages``) and the
epoch that wrote it (``prorl_epoch``): when a batch of the same id is ordered again after ``resume --fresh``, the file
of epoch n before it is kept as ``<batch_id>~<n>.parquet``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.observe.rollout_columns import (
    SCHEMA,
    TRAJECTORY_COLUMNS,
    VERSION,
    GroupPlace,
    RowGroup,
    StoredRollout,
    trajectory_at,
)

__all__ = ["SCHEMA", "GroupPlace", "RolloutFile", "RolloutStore", "StoredRollout", "read_rollouts"]

ROW_GROUP_ROLLOUTS = 256
ROW_GROUP_TOKENS = 250_000
"""A row group is what reading one rollout back reads."""


class RolloutFile:
    """A file on its way: ``add`` rollouts, then ``finish``, or ``abandon``. Until it is finished it is aside
    (``.rollouts-*.part``). Blocks: call it off the event loop. Raises OSError."""

    def __init__(self, target: Path, epoch: int) -> None:
        self._target = target
        self._epoch = epoch
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=target.parent, prefix=".rollouts-", suffix=".part")
        os.close(fd)
        self._aside = Path(name)
        metadata = {**(SCHEMA.metadata or {}), b"prorl_epoch": str(epoch).encode()}
        try:
            self._writer = pq.ParquetWriter(
                self._aside,
                SCHEMA.with_metadata(metadata),
                compression="zstd",
                use_dictionary=[field.name for field in SCHEMA if pa.types.is_string(field.type)],
                column_encoding={"logprobs.list.element": "BYTE_STREAM_SPLIT"},
            )
        except BaseException:
            self._aside.unlink(missing_ok=True)
            raise
        self._group = RowGroup()
        self._groups_written = 0

    @property
    def name(self) -> str:
        return self._target.name

    def add(self, row: StoredRollout) -> tuple[int, int]:
        """Returns where it will be: the row group, and the row in it."""
        if self._group.num_rows >= ROW_GROUP_ROLLOUTS or self._group.num_tokens >= ROW_GROUP_TOKENS:
            self._write_group()
        place = self._groups_written, self._group.num_rows
        self._group.add(row)
        return place

    def finish(self) -> Path:
        """The file is on disk under its name."""
        if self._group.num_rows:
            self._write_group()
        self._writer.close()
        _sync(self._aside)
        self._keep_older_epoch()
        self._aside.replace(self._target)
        _sync(self._target.parent)
        return self._target

    def abandon(self) -> None:
        """Leave nothing."""
        try:
            self._writer.close()
        finally:
            self._aside.unlink(missing_ok=True)

    def _write_group(self) -> None:
        self._writer.write_table(self._group.table())
        self._group = RowGroup()
        self._groups_written += 1

    def _keep_older_epoch(self) -> None:
        if not self._target.exists():
            return
        metadata = pq.read_schema(self._target).metadata or {}
        epoch = int(metadata.get(b"prorl_epoch", b"0"))
        if epoch != self._epoch:
            self._target.replace(self._target.with_name(f"{self._target.stem}~{epoch}.parquet"))


class RolloutStore:
    """The rollout files of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self._directory = run.rollouts

    def path(self, batch_id: str) -> Path:
        """Where a batch goes. Raises ValueError for an id that cannot name a file of its own."""
        if not batch_id or batch_id.startswith(".") or len(batch_id.encode()) > 200 or set(batch_id) & set("/\0~"):
            raise ValueError(
                f"batch_id {batch_id[:200]!r} cannot name a file: use up to 200 letters, digits, '-', '_' and '.'"
            )
        if re.fullmatch(r"single-\d+", batch_id):
            raise ValueError(f"batch_id {batch_id!r} would name a file of single rollouts: choose another")
        return self._directory / f"{batch_id}.parquet"

    def begin_batch(self, batch_id: str, epoch: int) -> RolloutFile:
        return RolloutFile(self.path(batch_id), epoch)

    def begin_singles(self, first_cursor: int, epoch: int) -> RolloutFile:
        return RolloutFile(self._directory / f"single-{first_cursor}.parquet", epoch)

    def write_batch(self, batch_id: str, result: BatchResult, epoch: int = 0) -> Path:
        """Write one batch, whole or not at all; an older file of the same id and epoch is replaced."""
        file = self.begin_batch(batch_id, epoch)
        try:
            for group in result.groups:
                place = GroupPlace(group.row_index, group.outcome, group.carried_from)
                for rollout in group.rollouts:
                    file.add(StoredRollout(rollout, rollout.trajectory, batch_id, result.elapsed_s, place))
            return file.finish()
        except BaseException:
            file.abandon()
            raise

    def read(self, name: str, places: Sequence[tuple[int, int]]) -> list[Trajectory]:
        """Trajectories from the file ``name``, by what ``add`` returned. Reads the row groups that they are in, one
        at a time. Raises OSError."""
        found: dict[tuple[int, int], Trajectory] = {}
        with pq.ParquetFile(self._directory / name) as file:
            for group in sorted({group for group, _ in places}):
                table = file.read_row_group(group, columns=TRAJECTORY_COLUMNS)
                found.update({place: trajectory_at(table, place[1]) for place in places if place[0] == group})
        return [found[place] for place in places]

    def remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def clear_aside(self) -> None:
        """Remove what a process that was killed left half written. Only for the one process that writes."""
        for path in self._directory.glob(".*.part"):
            path.unlink(missing_ok=True)


def read_rollouts(run: RunDirectory, columns: list[str] | None = None) -> pa.Table:
    """All rollouts of the run in one table, ordered by file name; empty if there are none. ``columns`` picks some of
    those above, which spares reading the tokens. Columns that an older file lacks are null. Raises ValueError for
    a file of a newer version."""
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    files = sorted(file for file in run.rollouts.glob("*.parquet") if not file.name.startswith("."))
    # One file at a time: a directory with a single odd file must name it.
    tables = [_read_file(file, schema) for file in files]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read_file(path: Path, schema: pa.Schema) -> pa.Table:
    with pq.ParquetFile(path) as file:
        version = int((file.schema_arrow.metadata or {}).get(b"prorl_rollouts", b"1"))
        if version > VERSION:
            raise ValueError(f"{path} is of version {version}, this prorl_hpc reads up to {VERSION}: use a newer one")
        there = set(file.schema_arrow.names)
        table = file.read(columns=[name for name in schema.names if name in there])
    for field in schema:
        if field.name not in there:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
