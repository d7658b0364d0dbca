"""Moves trajectories out of the journal in the background: into Parquet, or, where none is kept, away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.observe.rollout_columns import GroupPlace
from prorl_hpc.observe.rollout_store import RolloutFile, RolloutStore, StoredRollout
from prorl_hpc.rollout import journal_shelving as shelving
from prorl_hpc.rollout.journal_database import Database
from prorl_hpc.rollout.journal_results import FETCH_ROLLOUTS, AttemptNoted, Ended, Stored, fetch
from prorl_hpc.rollout.journal_thread import JournalThread

T = TypeVar("T")
log = logging.getLogger(__name__)

DatabaseThread = JournalThread[Database, Ended | AttemptNoted]
_slim = msgspec.msgpack.Decoder(RolloutResult)
_trajectory = msgspec.msgpack.Decoder(Trajectory)


@dataclass(frozen=True)
class ShelfLimits:
    """When single rollouts get a file: so many, or so many bytes, or nothing new for ``idle_s`` seconds, or the last
    file is ``oldest_s`` seconds old. Without Parquet: how many trajectories are kept."""

    file_rollouts: int = 2048
    file_bytes: int = 64 << 20
    idle_s: float = 20.0
    oldest_s: float = 300.0
    kept_batches: int = 8
    kept_singles: int = 2000


def decode_stored(stored: Stored) -> RolloutResult:
    """The slim result."""
    return _slim.decode(stored.slim)


def decode_trajectory(stored: Stored, result: RolloutResult) -> Trajectory:
    """Of one that is still in the journal. What does not decode is told and taken as empty: one worker's bad bytes
    must not keep all others' trajectories from being stored."""
    if stored.trajectory is None:
        return result.trajectory
    try:
        return _trajectory.decode(stored.trajectory)
    except (msgspec.DecodeError, RecursionError) as error:
        log.error("the trajectory of rollout %s from %s is left out: %s", stored.rollout_id, result.worker, error)
        return Trajectory()


class Shelf:
    """``run`` until ``finish``. ``store`` None: trajectories beyond the newest are dropped."""

    def __init__(self, thread: DatabaseThread, store: RolloutStore | None, limits: ShelfLimits) -> None:
        self._thread = thread
        self._store = store
        self._limits = limits
        self._clock = asyncio.get_running_loop().time
        self._woken = asyncio.Event()
        self._stopping = False
        self._leave_open_batches = False
        # One thread of its own: each thread's allocator keeps what it has freed.
        self._executor = ThreadPoolExecutor(1, "journal-shelf")
        self._singles = 0
        self._singles_bytes = 0
        self._last_single = self._last_file = self._clock()

    def wake(self) -> None:
        """A batch has a result."""
        self._woken.set()

    def single_recorded(self, size: int) -> None:
        self._singles += 1
        self._singles_bytes += size
        self._last_single = self._clock()
        limits = self._limits
        if self._store is None:
            enough = self._singles >= limits.kept_singles // 4
        else:
            enough = self._singles >= limits.file_rollouts or self._singles_bytes >= limits.file_bytes
        if enough:
            self._woken.set()

    async def run(self) -> None:
        """Raises OSError when a file cannot be written, RunError when the journal fails."""
        await self._tidy()
        while not self._stopping:
            self._woken.clear()
            self._singles = self._singles_bytes = 0
            if self._store is None:
                await self._drop()
            else:
                await self._shelve(self._store)
            await self._wait()
        if self._store is not None:
            while await self._shelve_one(self._store, last=True):
                pass
        self._executor.shutdown()

    async def _off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def stop(self, *, leave_open_batches: bool = False) -> None:
        """Let ``run`` write all that is left, and return. ``leave_open_batches``: but for results of batches that have
        none yet; they stay in the journal."""
        self._leave_open_batches = leave_open_batches
        self._stopping = True
        self._woken.set()

    async def _wait(self) -> None:
        if self._stopping:
            return
        try:
            async with asyncio.timeout(self._limits.idle_s):
                await self._woken.wait()
        except TimeoutError:
            pass  # single rollouts may have waited for long enough

    async def _tidy(self) -> None:
        """What a process that was killed has left."""
        if self._store is not None:
            for name in await self._thread.call(shelving.unfinished_files, writes=False):
                await self._off_loop(self._store.remove, name)
            await self._off_loop(self._store.clear_aside)
        await self._thread.call(shelving.forget_unfinished_files)
        while cursors := await self._thread.call(shelving.shelved_but_there, writes=False):
            await self._thread.call(partial(shelving.drop_shelved, cursors=cursors))
        self._woken.set()

    async def _drop(self) -> None:
        limits = self._limits
        drop = partial(shelving.drop_unkept, batches=limits.kept_batches, singles=limits.kept_singles)
        while await self._thread.call(drop):
            pass
        await self._purge()

    async def _shelve(self, store: RolloutStore) -> None:
        while not self._stopping and await self._shelve_one(store, last=False):
            pass
        await self._purge()

    async def _purge(self) -> None:
        while not self._stopping and await self._thread.call(shelving.purge_older_epochs):
            pass

    async def _shelve_one(self, store: RolloutStore, *, last: bool) -> bool:
        batch = await self._thread.call(shelving.next_batch, writes=False)
        if batch is not None:
            await self._write_batch(store, batch)
            return True
        limits = self._limits
        ask = partial(
            shelving.next_loose,
            limit=limits.file_rollouts,
            max_bytes=limits.file_bytes,
            all_of_them=last and not self._leave_open_batches,
        )
        loose, enough = await self._thread.call(ask, writes=False)
        if loose is None or not (enough or last or self._waited_long()):
            return False
        await self._write_loose(store, loose)
        return True

    def _waited_long(self) -> bool:
        now = self._clock()
        return now - self._last_single >= self._limits.idle_s or now - self._last_file >= self._limits.oldest_s

    async def _write_batch(self, store: RolloutStore, batch: shelving.BatchToShelve) -> None:
        file = await self._off_loop(store.begin_batch, batch.batch_id, batch.epoch)
        places = await self._fill(file, list(batch.groups), batch)

        def note(db: Database) -> None:
            number = shelving.begin_file(db, batch.epoch, file.name)
            shelving.note_places(db, number, places, batch.order)

        await self._thread.call(note)
        await self._drop_shelved(list(batch.groups))

    async def _write_loose(self, store: RolloutStore, loose: shelving.LooseToShelve) -> None:
        file = await self._off_loop(store.begin_singles, loose.cursors[0], loose.epoch)
        number = await self._thread.call(partial(shelving.begin_file, epoch=loose.epoch, name=file.name))
        places = await self._fill(file, loose.cursors, None)
        await self._thread.call(partial(shelving.note_places, file=number, places=places, order=None))
        await self._drop_shelved(loose.cursors)
        self._last_file = self._clock()

    async def _fill(
        self, file: RolloutFile, cursors: Sequence[int], batch: shelving.BatchToShelve | None
    ) -> list[tuple[int, int, int]]:
        places: list[tuple[int, int, int]] = []
        try:
            rest = list(cursors)
            while rest:
                piece = await self._thread.call(partial(fetch, cursors=rest[:FETCH_ROLLOUTS]), writes=False)
                places += await self._off_loop(_add, file, piece, batch)
                del rest[: len(piece)]
            await self._off_loop(file.finish)
        except BaseException:
            await self._off_loop(file.abandon)
            raise
        return places

    async def _drop_shelved(self, cursors: Sequence[int]) -> None:
        for start in range(0, len(cursors), FETCH_ROLLOUTS):
            piece = cursors[start : start + FETCH_ROLLOUTS]
            await self._thread.call(partial(shelving.drop_shelved, cursors=piece))


def _add(
    file: RolloutFile, piece: Iterable[Stored], batch: shelving.BatchToShelve | None
) -> list[tuple[int, int, int]]:
    places = []
    for stored in piece:
        result = decode_stored(stored)
        group: GroupPlace | None = batch.groups[stored.cursor] if batch is not None else None
        row = StoredRollout(
            result,
            decode_trajectory(stored, result),
            batch.batch_id if batch is not None else stored.batch_id,
            batch.elapsed_s if batch is not None else None,
            group,
            stored.cursor,
        )
        places.append((stored.cursor, *file.add(row)))
    return places
