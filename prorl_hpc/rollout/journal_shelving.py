"""Which trajectories leave the journal for Parquet next, and what is noted then. Runs on the journal's thread.

A crash at any moment loses and doubles nothing: a trajectory stays in the journal until the file that has it is on
disk under its name. A batch whose file was not noted is written anew, under the same name. A file of singles is noted
before it is begun, and removed after a crash if it was not noted as done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prorl_hpc.messages.batch import BatchResult, GroupOutcome
from prorl_hpc.observe.rollout_columns import GroupPlace
from prorl_hpc.rollout.journal_database import Database
from prorl_hpc.rollout.journal_orders import json_list
from prorl_hpc.rollout.journal_results import GONE

_DELETE_ROLLOUTS = 64
_PURGE_ROWS = 500
_batch_result = msgspec.msgpack.Decoder(BatchResult)


@dataclass(frozen=True)
class BatchToShelve:
    """A batch with a result. ``groups``: for each rollout to be written, by cursor in the order of the file, its
    group's place."""

    order: int
    epoch: int
    batch_id: str
    elapsed_s: float
    groups: dict[int, GroupPlace]


@dataclass(frozen=True)
class LooseToShelve:
    """Results of no finished batch."""

    epoch: int
    cursors: list[int]


def next_batch(db: Database) -> BatchToShelve | None:
    """The oldest batch that is not on the shelf."""
    row = db.execute(
        "SELECT number, epoch, name, result FROM orders WHERE finished IS NOT NULL AND shelved = 0 "
        "ORDER BY finished, number LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    number, epoch, name, blob = row
    result = _batch_result.decode(blob)
    places = {
        rollout.rollout_id: GroupPlace(group.row_index, group.outcome, group.carried_from)
        for group in result.groups
        if group.outcome is not GroupOutcome.CARRIED  # a later batch's
        for rollout in group.rollouts
    }
    sql = (
        "SELECT rollout, cursor FROM results WHERE epoch = ? AND file IS NULL "
        "AND rollout IN (SELECT value FROM json_each(?))"
    )
    cursors = dict(db.execute(sql, epoch, json_list(places)).fetchall())
    groups = {cursors[rollout]: place for rollout, place in places.items() if rollout in cursors}
    return BatchToShelve(number, epoch, name, result.elapsed_s, groups)


def next_loose(db: Database, *, limit: int, max_bytes: int, all_of_them: bool) -> tuple[LooseToShelve | None, bool]:
    """What older epochs left, else single rollouts of this one, or with ``all_of_them`` whatever is not on the shelf;
    and whether that is worth a file now: it is old, or as much as was asked for."""
    sql = "SELECT epoch, cursor, size FROM results WHERE file IS NULL AND epoch {} ORDER BY epoch, cursor LIMIT ?"
    rows = db.execute(sql.format("< ?"), db.epoch, limit).fetchall()
    old = bool(rows)
    if not rows:
        rows = db.execute(sql.format("= ?" if all_of_them else "= ? AND batch = ''"), db.epoch, limit).fetchall()
    if not rows:
        return None, False
    total = 0
    cursors: list[int] = []
    for epoch, cursor, size in rows:
        if epoch != rows[0][0] or total >= max_bytes:
            break
        cursors.append(cursor)
        total += size
    return LooseToShelve(rows[0][0], cursors), old or all_of_them or len(cursors) >= limit or total >= max_bytes


def waiting(db: Database) -> tuple[int, int]:
    """How many trajectories are in the journal, and their bytes."""
    (count, size) = db.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM results WHERE file IS NULL").fetchone()
    return count, size


def begin_file(db: Database, epoch: int, name: str) -> int:
    number = db.execute("INSERT INTO files (epoch, name) VALUES (?, ?)", epoch, name).lastrowid
    assert number is not None
    return number


def unfinished_files(db: Database) -> list[str]:
    """Files of singles that a process that was killed had begun."""
    return [name for (name,) in db.execute("SELECT name FROM files WHERE noted = 0")]


def forget_unfinished_files(db: Database) -> None:
    db.execute("DELETE FROM files WHERE noted = 0")


def note_places(db: Database, file: int, places: Sequence[tuple[int, int, int]], order: int | None) -> None:
    """(cursor, row group, row) of each rollout in the file, which is on disk. ``order``: the batch's, if it is one."""
    db.execute("UPDATE files SET noted = 1 WHERE number = ?", file)
    db.execute(
        "UPDATE results SET file = ?, row_group = json_extract(p.value, '$[1]'), place = json_extract(p.value, '$[2]') "
        "FROM json_each(?) AS p WHERE cursor = json_extract(p.value, '$[0]')",
        *(file, json_list(places)),
    )
    if order is not None:
        db.execute("UPDATE orders SET shelved = 1 WHERE number = ?", order)


def drop_shelved(db: Database, cursors: Sequence[int]) -> None:
    """Delete trajectories that are elsewhere; their pages are used again."""
    db.execute("DELETE FROM trajectories WHERE cursor IN (SELECT value FROM json_each(?))", json_list(cursors))


def shelved_but_there(db: Database) -> list[int]:
    """Trajectories that a process that was killed had no time to drop."""
    sql = "SELECT t.cursor FROM trajectories t JOIN results r ON r.cursor = t.cursor WHERE r.file IS NOT NULL LIMIT ?"
    return [cursor for (cursor,) in db.execute(sql, _DELETE_ROLLOUTS)]


def drop_unkept(db: Database, *, batches: int, singles: int) -> bool:
    """Without Parquet: drop some trajectories beyond those of the newest ``batches`` and ``singles``, and all of older
    epochs. False if there were none."""
    cursors = [
        cursor
        for (cursor,) in db.execute(
            "SELECT cursor FROM results WHERE epoch < ? AND file IS NULL LIMIT ?", db.epoch, _DELETE_ROLLOUTS
        )
    ]
    if not cursors:
        db.execute("UPDATE orders SET shelved = 1 WHERE finished IS NOT NULL AND shelved = 0 AND epoch < ?", db.epoch)
        cursors = _of_unkept_batch(db, batches)
    if not cursors:
        sql = (
            "SELECT cursor FROM results WHERE epoch = ? AND batch = '' AND file IS NULL "
            "ORDER BY cursor DESC LIMIT ? OFFSET ?"
        )
        cursors = [cursor for (cursor,) in db.execute(sql, db.epoch, _DELETE_ROLLOUTS, singles)]
    if not cursors:
        return False
    sql = "UPDATE results SET file = ? WHERE cursor IN (SELECT value FROM json_each(?))"
    db.execute(sql, GONE, json_list(cursors))
    drop_shelved(db, cursors)
    return True


def _of_unkept_batch(db: Database, kept: int) -> list[int]:
    while True:
        batch = db.execute(
            "SELECT number, name FROM orders WHERE epoch = ? AND finished IS NOT NULL AND shelved = 0 "
            "AND state = 'closed' ORDER BY finished DESC, number DESC LIMIT 1 OFFSET ?",
            *(db.epoch, kept),
        ).fetchone()
        if batch is None:
            return []
        number, name = batch
        sql = "SELECT cursor FROM results WHERE epoch = ? AND batch = ? AND file IS NULL LIMIT ?"
        cursors = [cursor for (cursor,) in db.execute(sql, db.epoch, name, _DELETE_ROLLOUTS)]
        if cursors:
            return cursors
        db.execute("UPDATE orders SET shelved = 1 WHERE number = ?", number)


def purge_older_epochs(db: Database) -> bool:
    """Delete some rows of older epochs whose trajectories are elsewhere. False if there were none."""
    deleted = 0
    for table, key, condition in (
        ("results", "cursor", "file IS NOT NULL"),
        ("orders", "number", "(finished IS NULL OR shelved = 1)"),
        ("cancels", "rowid", "TRUE"),
        ("files", "number", "noted = 1"),
    ):
        sql = f"SELECT {key} FROM {table} WHERE epoch < ? AND {condition} LIMIT ?"
        deleted += db.execute(f"DELETE FROM {table} WHERE {key} IN ({sql})", db.epoch, _PURGE_ROWS).rowcount
    deleted += db.execute("DELETE FROM attempts WHERE epoch < ?", db.epoch).rowcount
    return deleted > 0
