"""Results in the journal: written, listed, fetched. Everything here runs on the journal's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_hpc.messages.rollout import RolloutProgress, Status
from prorl_hpc.rollout.journal_database import Database
from prorl_hpc.rollout.journal_orders import json_list
from prorl_hpc.rollout.policy_figures import EndedRollout, PolicyFigures
from prorl_hpc.service.errors import not_found

FETCH_ROLLOUTS = 64
FETCH_BYTES = 4 << 20
_ROWS_TOGETHER = (64, 16, 4, 1)
_TOGETHER_BYTES = 1 << 20
GONE = 0
"""In place of a file's number: the trajectory was dropped."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout's result to be recorded. ``slim``: RolloutResult in msgpack without its trajectory."""

    rollout_id: str
    batch_id: str
    policy: str
    status: str
    slim: bytes
    trajectory: msgspec.Raw | bytes | None
    size: int


@dataclass(frozen=True, slots=True)
class AttemptNoted:
    """``spared``: how many attempts before it used up no retry."""

    rollout_id: str
    attempt: int
    spared: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """A recorded result as it lies on disk. ``file`` None: ``trajectory`` has it (None: there is none); empty: it was
    dropped; else it is at ``place`` in that Parquet file."""

    cursor: int
    rollout_id: str
    batch_id: str
    slim: bytes
    size: int
    trajectory: bytes | None
    file: str | None
    place: tuple[int, int]


class _Ending(msgspec.Struct, frozen=True):
    """The fields of RolloutResult that RolloutProgress shows."""

    rollout_id: str
    status: Status
    attempts: int = 1
    worker: str = ""
    server: str = ""
    policy: str = "policy"


_ending = msgspec.msgpack.Decoder(_Ending)
_counted = msgspec.msgpack.Decoder(EndedRollout)


def write_items(db: Database, items: Sequence[Ended | AttemptNoted]) -> list[int | None]:
    """Record results and attempts; returns the cursor of each result. A rollout recorded before keeps its first
    result, and its cursor is returned again."""
    endings = [item for item in items if isinstance(item, Ended)]
    cursors = _write_results(db, endings) if endings else {}
    attempts: dict[str, tuple[int, int]] = {}
    for item in items:
        if isinstance(item, AttemptNoted) and item.rollout_id not in cursors:
            attempts[item.rollout_id] = max((item.attempt, item.spared), attempts.get(item.rollout_id, (0, 0)))
    if attempts:
        rows = [(db.epoch, rollout, *numbers) for rollout, numbers in attempts.items()]
        newer = " ON CONFLICT DO UPDATE SET attempt = excluded.attempt, spared = excluded.spared"
        _insert(db, "attempts", rows, f"{newer} WHERE excluded.attempt > attempt")
    return [cursors[item.rollout_id] if isinstance(item, Ended) else None for item in items]


def _write_results(db: Database, endings: list[Ended]) -> dict[str, int]:
    names = json_list(ended.rollout_id for ended in endings)
    sql = "SELECT rollout, cursor FROM results WHERE epoch = ? AND rollout IN (SELECT value FROM json_each(?))"
    cursors: dict[str, int] = dict(db.execute(sql, db.epoch, names).fetchall())
    results, trajectories = [], []
    for ended in endings:
        if ended.rollout_id in cursors:
            continue
        db.newest += 1
        cursor = cursors[ended.rollout_id] = db.newest
        results.append(
            (
                *(cursor, db.epoch, ended.rollout_id, ended.batch_id, ended.status, ended.slim, ended.size),
                *(*_NOWHERE, ended.policy),
            )
        )
        trajectories.append((cursor, ended.trajectory))
    if not results:
        return cursors
    _insert(db, "results", results)
    if sum(ended.size for ended in endings) <= _TOGETHER_BYTES:
        _insert(db, "trajectories", trajectories)
    else:
        db.connection.executemany("INSERT INTO trajectories VALUES (?, ?)", trajectories)
    db.execute("DELETE FROM attempts WHERE epoch = ? AND rollout IN (SELECT value FROM json_each(?))", db.epoch, names)
    singles = [ended.rollout_id for ended in endings if not ended.batch_id]
    if singles:
        db.execute(
            "UPDATE orders SET state = 'closed', spec = NULL "
            "WHERE epoch = ? AND kind = 'rollout' AND name IN (SELECT value FROM json_each(?))",
            *(db.epoch, json_list(singles)),
        )
    return cursors


_NOWHERE = (None, None, None)


def _insert(db: Database, table: str, rows: list[Any], more: str = "") -> None:
    """Many rows to a statement: see journal_thread. Only a few sizes of it, because each that SQLite has prepared
    keeps a copy of what it was last given."""
    row = f"({', '.join('?' * len(rows[0]))})"
    start = 0
    while start < len(rows):
        count = next(size for size in _ROWS_TOGETHER if size <= len(rows) - start)
        values = [value for one in rows[start : start + count] for value in one]
        db.connection.execute(f"INSERT INTO {table} VALUES {', '.join([row] * count)}{more}", values)
        start += count


def progress(db: Database, rollout_id: str) -> RolloutProgress | None:
    row = db.execute("SELECT slim, batch FROM results WHERE epoch = ? AND rollout = ?", db.epoch, rollout_id).fetchone()
    return None if row is None else _progress(*row)


def ended(
    db: Database, status: Status | None, batch_id: str, policy: str, after: str, limit: int
) -> list[RolloutProgress]:
    cursor = 0
    if after:
        row = db.execute("SELECT cursor FROM results WHERE epoch = ? AND rollout = ?", db.epoch, after).fetchone()
        if row is None:
            raise not_found("rollout", after)
        (cursor,) = row
    wanted = {"status": status.value if status else "", "batch": batch_id, "policy": policy}
    return [_progress(*row) for row in _behind(db, "slim, batch", cursor, wanted, limit)]


def ended_figures(db: Database, policies: Sequence[str]) -> PolicyFigures:
    figures = PolicyFigures(policies)
    for (slim,) in db.execute("SELECT slim FROM results WHERE epoch = ?", db.epoch):
        figures.count(_counted.decode(slim))
    return figures


def ended_counts(db: Database) -> dict[Status, int]:
    rows = db.execute("SELECT status, count(*) FROM results WHERE epoch = ? GROUP BY status", db.epoch)
    return {Status(status): count for status, count in rows}


def _progress(slim: bytes, batch: str) -> RolloutProgress:
    ending = _ending.decode(slim)
    return RolloutProgress(
        ending.rollout_id, ending.status, ending.attempts, ending.worker, ending.server, batch, ending.policy
    )


def cursors_after(db: Database, cursor: int, batch_id: str, policy: str, limit: int) -> list[int]:
    """Of this epoch's results: of all, or of one batch or policy."""
    rows = _behind(db, "cursor", cursor, {"batch": batch_id, "policy": policy}, limit)
    return [number for (number,) in rows]


def _behind(db: Database, columns: str, cursor: int, wanted: Mapping[str, str], limit: int) -> sqlite3.Cursor:
    """``columns`` of this epoch's results behind ``cursor`` that have the ``wanted`` values; empty ones are not asked for."""
    given = {column: value for column, value in wanted.items() if value}
    conditions = " AND ".join(["epoch = ?", "cursor > ?", *(f"{column} = ?" for column in given)])
    sql = f"SELECT {columns} FROM results WHERE {conditions} ORDER BY cursor LIMIT ?"
    return db.execute(sql, db.epoch, cursor, *given.values(), limit)


def cursors_of(db: Database, rollout_ids: Sequence[str]) -> dict[str, int]:
    """Of those that are recorded."""
    sql = "SELECT rollout, cursor FROM results WHERE epoch = ? AND rollout IN (SELECT value FROM json_each(?))"
    return dict(db.execute(sql, db.epoch, json_list(rollout_ids)).fetchall())


def fetch(db: Database, cursors: Sequence[int]) -> list[Stored]:
    """The first of these results, in the given order: at most FETCH_ROLLOUTS, and no more than fit in FETCH_BYTES,
    but one at least."""
    wanted = list(cursors[:FETCH_ROLLOUTS])
    in_list = json_list(wanted)
    sizes = dict(
        db.execute("SELECT cursor, size FROM results WHERE cursor IN (SELECT value FROM json_each(?))", in_list)
    )
    total, count = 0, 0
    for cursor in wanted:
        total += sizes[cursor]
        if count and total > FETCH_BYTES:
            break
        count += 1
    rows = db.execute(
        "SELECT r.cursor, r.rollout, r.batch, r.slim, t.trajectory, r.file, f.name, r.row_group, r.place FROM results r "
        "LEFT JOIN trajectories t ON t.cursor = r.cursor AND r.file IS NULL LEFT JOIN files f ON f.number = r.file "
        "WHERE r.cursor IN (SELECT value FROM json_each(?))",
        json_list(wanted[:count]),
    )
    found: dict[int, Stored] = {}
    for cursor, rollout, batch, slim, trajectory, file, name, row_group, place in rows:
        where = None if file is None else name or ""
        found[cursor] = Stored(
            cursor, rollout, batch, slim, sizes[cursor], trajectory, where, (row_group or 0, place or 0)
        )
    return [found[cursor] for cursor in wanted[:count]]
