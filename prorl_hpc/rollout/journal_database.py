"""The journal's file: its tables, its one owner, its epochs.

============  ======================================================================================================
epochs        only the newest one's orders and results count. ``attempt``: of the run, the last one that worked on it
orders        batches and single rollouts in order of acceptance. ``state``: running, full (a batch with a result
              whose groups go on), closed. ``spec`` goes when the order is closed, ``digest`` stays. ``after_cursor``, ``finished``: the newest
              cursor when it was accepted, and when its result was recorded. ``asleep``: nobody has asked for it since
              the attempt of the run began
cancels       when batches were cancelled, by the newest cursor then
attempts      the highest attempt noted of rollouts that have not ended, and how many before it used up no retry
results       ended rollouts in the order of recording, without trajectory. ``batch``: whose they are now, or empty.
              ``policy``: the one that was drawn, where the order named ``any``.
              ``file``: NULL while the trajectory is in the table below, 0 when it was dropped, else in which file
trajectories  what is not in Parquet yet: msgpack, or NULL for none
files         Parquet files by number; ``noted`` 0 while a file is being written
============  ======================================================================================================
"""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError

SCHEMA_VERSION = 3
_LOCK_WAIT_S = 1.0
_TABLES = """
CREATE TABLE epochs (number INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, paused INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0);
CREATE TABLE orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    digest BLOB NOT NULL, spec BLOB, carried BLOB, after_cursor INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'running',
    result BLOB, progress BLOB, finished INTEGER, shelved INTEGER NOT NULL DEFAULT 0,
    asleep INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX orders_by_name ON orders (epoch, kind, name);
CREATE INDEX orders_open ON orders (epoch, number) WHERE state <> 'closed';
CREATE INDEX orders_to_shelve ON orders (finished) WHERE finished IS NOT NULL AND shelved = 0;
CREATE TABLE cancels (epoch INTEGER NOT NULL, batch TEXT NOT NULL, after_cursor INTEGER NOT NULL);
CREATE TABLE attempts (epoch INTEGER NOT NULL, rollout TEXT NOT NULL, attempt INTEGER NOT NULL,
    spared INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (epoch, rollout)) WITHOUT ROWID;
CREATE TABLE results (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, rollout TEXT NOT NULL, batch TEXT NOT NULL,
    status TEXT NOT NULL, slim BLOB NOT NULL, size INTEGER NOT NULL, file INTEGER, row_group INTEGER, place INTEGER,
    policy TEXT NOT NULL DEFAULT 'policy');
CREATE UNIQUE INDEX results_by_rollout ON results (epoch, rollout);
CREATE INDEX results_by_batch ON results (epoch, batch, cursor);
CREATE INDEX results_unshelved ON results (epoch, batch, cursor) WHERE file IS NULL;
CREATE TABLE trajectories (cursor INTEGER PRIMARY KEY, trajectory BLOB);
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, name TEXT NOT NULL,
    noted INTEGER NOT NULL DEFAULT 0);
"""
_SINCE_1 = """
ALTER TABLE epochs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
ALTER TABLE orders ADD COLUMN asleep INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN spared INTEGER NOT NULL DEFAULT 0;
"""
_SINCE_2 = """
ALTER TABLE results ADD COLUMN policy TEXT NOT NULL DEFAULT 'policy';
"""


class JournalInUse(RunError):
    """Another process has the journal open. ``attempt``: whose coordinator it is, 0 if that is not known."""

    def __init__(self, message: str, attempt: int = 0) -> None:
        super().__init__(message)
        self.attempt = attempt


class Holder(msgspec.Struct, frozen=True):
    """Who has the journal open."""

    pid: int
    node: str
    since: float
    attempt: int = 0


@dataclass
class Database:
    """The open file, for the journal's thread alone. ``epoch``: its number. ``attempt``: of the run, the present one;
    ``cut_off``: the one that worked on the epoch before was another. ``newest``: the newest result's cursor, 0 if there
    is none, perhaps not committed yet."""

    connection: sqlite3.Connection
    epoch: int
    attempt: int
    cut_off: bool
    newest: int

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        return self.connection.execute(sql, parameters)


def open_database(path: Path, token: str, attempt: int, node: str) -> Database:
    """Open or create the journal and begin the epoch of ``token``, if it is not the newest one. Raises RunError,
    of it JournalInUse."""
    try:
        connection = _connect(path)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") in ("SQLITE_BUSY", "SQLITE_LOCKED"):
            raise _in_use(path) from error
        raise RunError(f"the journal {path} cannot be opened: {error}{remedy(error)}") from error
    except OSError as error:
        raise RunError(f"the journal {path} cannot be created: {error}") from error
    try:
        _make_tables(connection, path)
        write_json(holder_file(path), Holder(os.getpid(), node, time.time(), attempt))
        epoch, cut_off = _begin_epoch(connection, token, attempt)
        (newest,) = connection.execute(
            "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'results'"
        ).fetchone()
    except (sqlite3.Error, OSError) as error:
        connection.close()
        raise RunError(f"the journal {path} cannot be used: {error}{remedy(error)}") from error
    except BaseException:
        connection.close()
        raise
    return Database(connection, epoch, attempt, cut_off, newest)


def holder_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def _connect(path: Path) -> sqlite3.Connection:
    try:
        # Closing a file that this process has open would give up its locks: never open one that is there.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    connection = sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None, cached_statements=256)
    try:
        # Exclusive first: the write-ahead log then needs no shared memory, which network file systems lack.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA wal_autocheckpoint = 2000")
        connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def remedy(error: Exception) -> str:
    """What a person can do about it, as the end of a message."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            ". It is damaged: move it and the files beside it (-wal, .holder) away, then resume. What is in rollouts/ "
            "stays; open orders and results that were in the journal alone are lost"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return ". Make it and its directory writable for this user, then resume"
    return ". Free space in the run directory, then resume" if isinstance(error, sqlite3.Error | OSError) else ""


def _in_use(path: Path) -> JournalInUse:
    try:
        holder = msgspec.json.decode(holder_file(path).read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return JournalInUse(f"the journal {path} is in use by another process: end that first")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    who = f"process {holder.pid} on {holder.node} since {since}"
    return JournalInUse(f"the journal {path} is in use by {who}: end that first", holder.attempt)


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise RunError(
            f"the journal {path} is of version {version}, this prorl_hpc knows {SCHEMA_VERSION}: use the newer one"
        )
    changes = {0: _TABLES, 1: _SINCE_1 + _SINCE_2, 2: _SINCE_2}.get(version, "")
    if changes:
        connection.executescript(f"BEGIN;{changes}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")


def _begin_epoch(connection: sqlite3.Connection, token: str, attempt: int) -> tuple[int, bool]:
    newest = connection.execute("SELECT number, token, attempt FROM epochs ORDER BY number DESC LIMIT 1").fetchone()
    if newest is not None and newest[1] == token:
        return int(newest[0]), newest[2] != attempt
    cursor = connection.execute("INSERT INTO epochs (token, attempt) VALUES (?, ?)", (token, attempt))
    assert cursor.lastrowid is not None
    return cursor.lastrowid, False
