"""The one thread that touches the journal's database: group commit, in the order of the calls.

The event loop puts work into a queue; the thread takes all that waits, does it in one transaction, commits once (one
fsync) and then answers all callers with one wake-up of the loop. Every statement releases the GIL and must win it
back, which takes milliseconds while the loop is busy: therefore records, which come by the hundred, are collected
and written many to a statement.

Work may refuse (raise ProrlError) before its first write, and then fails alone. Anything else that it raises means
that the disk, or this code, is broken: the journal fails, and everybody who waits is told.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.rollout.journal_database import remedy

T = TypeVar("T")
D = TypeVar("D")
I = TypeVar("I")  # noqa: E741

_OPS_PER_COMMIT = 512
_BYTES_PER_COMMIT = 8 << 20
_ITEMS_PER_PIECE = 64


@dataclass(slots=True)
class _Call(Generic[D]):
    """Runs by itself. ``writes`` false: needs no commit."""

    work: Callable[[D], Any]
    future: asyncio.Future[Any]
    writes: bool


@dataclass(slots=True)
class _Item(Generic[I]):
    """Runs together with its neighbours."""

    item: I
    size: int
    future: asyncio.Future[Any] | None


@dataclass(slots=True)
class _Close:
    future: asyncio.Future[Any]


_Answer = tuple[asyncio.Future[Any], Any, Exception | None]


class JournalThread(Generic[D, I]):
    """``D``: the database as the work sees it; ``I``: the items that are written many at once.

    ``committed`` is called on the loop after every commit, with what ``newest`` said then and the seconds that it
    took, before the callers are answered; ``failed`` when the journal fails, before the callers are told.
    """

    def __init__(
        self,
        *,
        open_database: Callable[[], D],
        connection: Callable[[D], sqlite3.Connection],
        write_items: Callable[[D, Sequence[I]], Sequence[Any]],
        newest: Callable[[D], int],
        committed: Callable[[int, float], None],
        failed: Callable[[RunError], None],
    ) -> None:
        self._open_database = open_database
        self._connection = connection
        self._write_items = write_items
        self._newest = newest
        self._committed = committed
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Call[D] | _Item[I] | _Close] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="journal", daemon=True)
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._closed = False

    async def start(self) -> None:
        """Open the database. Raises what that raises."""
        self._thread.start()
        try:
            await self._opened
        except BaseException:
            self._closed = True
            raise

    def call(self, work: Callable[[D], T], *, writes: bool = True) -> asyncio.Future[T]:
        """Do ``work`` on the thread, in one piece, and commit. Keep it short: everything waits behind it."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._put(_Call(work, future, writes))
        return future

    def add(self, item: I, size: int) -> asyncio.Future[Any]:
        """Write ``item`` of about ``size`` bytes."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._put(_Item(item, size, future))
        return future

    def add_silently(self, item: I) -> None:
        """Write ``item``; nobody waits for it."""
        self._put(_Item(item, 0, None))

    async def close(self) -> None:
        """Do all that waits, then close the database."""
        if not self._closed:
            future = self._loop.create_future()
            self._put(_Close(future))
            self._closed = True
            await future
            await asyncio.to_thread(self._thread.join)

    def _put(self, op: _Call[D] | _Item[I] | _Close) -> None:
        if self._closed:
            raise RunError("the journal is closed: nothing more can be recorded")
        self._queue.put(op)

    # on the thread

    def _main(self) -> None:
        try:
            database = self._open_database()
        except Exception as error:
            self._tell(partial(_answer, [(self._opened, None, error)]))
            return
        self._tell(partial(_answer, [(self._opened, None, None)]))
        try:
            last = self._serve(database)
        except Exception as error:
            failure = _failure(error)
            self._tell(partial(self._failed, failure))
            self._refuse(failure)
            return
        self._tell(partial(_answer, [(last.future, None, None)]))

    def _serve(self, database: D) -> _Close:
        connection = self._connection(database)
        close: _Close | None = None
        try:
            while close is None:
                ops, close = self._take()
                began = time.monotonic()
                answers = self._do(database, connection, ops)
                seconds = time.monotonic() - began
                del ops  # the bytes are on disk
                if answers:
                    self._tell(partial(self._committed, self._newest(database), seconds))
                    self._tell(partial(_answer, answers))
        finally:
            connection.close()
        return close

    def _take(self) -> tuple[list[_Call[D] | _Item[I]], _Close | None]:
        """Waits for work, then takes what there is, up to a limit."""
        ops: list[_Call[D] | _Item[I]] = []
        size = 0
        op = self._queue.get()
        while True:
            if isinstance(op, _Close):
                return ops, op
            ops.append(op)
            size += op.size if isinstance(op, _Item) else 0
            if len(ops) >= _OPS_PER_COMMIT or size >= _BYTES_PER_COMMIT:
                return ops, None
            try:
                op = self._queue.get_nowait()
            except queue.Empty:
                return ops, None

    def _do(self, database: D, connection: sqlite3.Connection, ops: list[_Call[D] | _Item[I]]) -> list[_Answer]:
        answers: list[_Answer] = []
        writes = any(isinstance(op, _Item) or op.writes for op in ops)
        try:
            if writes:
                connection.execute("BEGIN IMMEDIATE")
            for piece in _pieces(ops):
                if isinstance(piece, _Call):
                    answers.append(self._do_call(database, piece))
                else:
                    values = self._write_items(database, [item.item for item in piece])
                    for item, value in zip(piece, values, strict=True):
                        if item.future is not None:
                            answers.append((item.future, value, None))
            if writes:
                connection.execute("COMMIT")
        except Exception as error:
            failure = _failure(error)
            self._tell(partial(self._failed, failure))
            self._tell(partial(_answer, [(op.future, None, failure) for op in ops if op.future is not None]))
            raise failure from error
        return answers

    def _do_call(self, database: D, call: _Call[D]) -> _Answer:
        try:
            return call.future, call.work(database), None
        except ProrlError as refusal:
            return call.future, None, refusal

    def _refuse(self, failure: RunError) -> None:
        while True:
            op = self._queue.get()
            if isinstance(op, _Close):
                self._tell(partial(_answer, [(op.future, None, None)]))
                return
            if op.future is not None:
                self._tell(partial(_answer, [(op.future, None, failure)]))

    def _tell(self, callback: Callable[[], None]) -> None:
        # A loop that was closed without closing the journal has nobody to tell; what it recorded is on disk.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


def _pieces(ops: list[_Call[D] | _Item[I]]) -> Iterator[_Call[D] | list[_Item[I]]]:
    """Calls one by one, neighbouring items together."""
    piece: list[_Item[I]] = []
    for op in ops:
        if isinstance(op, _Item):
            piece.append(op)
            if len(piece) < _ITEMS_PER_PIECE:
                continue
        if piece:
            yield piece
            piece = []
        if isinstance(op, _Call):
            yield op
    if piece:
        yield piece


def _failure(error: Exception) -> RunError:
    if isinstance(error, RunError):
        return error
    failure = RunError(f"the journal cannot be used: {error}{remedy(error)}")
    failure.__cause__ = error
    return failure


def _answer(answers: list[_Answer]) -> None:
    for future, value, error in answers:
        if future.done():  # whoever asked has gone
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
