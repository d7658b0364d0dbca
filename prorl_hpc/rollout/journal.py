"""The coordinator's memory on disk: orders before they are answered, results before anybody gets them.

Calls take effect on disk in the order in which they are made. A future (or an awaited call) is done when its change
is on disk. The event loop never waits for the disk: see journal_thread. A disk that fails ends the journal: every
waiter gets RunError, and ``failed`` is set.

Orders, ids and results are those of the journal's own epoch, which spans all attempts of a run (rollout.epoch); what
older ones left is moved to Parquet and forgotten. Cursors go on through all epochs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import node_name
from prorl_hpc.core.events import Unfinished
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import NumberedResult, RolloutProgress, RolloutResult, RolloutSpec, Status
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout import journal_orders as orders
from prorl_hpc.rollout import journal_results as results
from prorl_hpc.rollout import journal_shelving as shelving
from prorl_hpc.rollout.journal_database import Database, holder_file, open_database
from prorl_hpc.rollout.journal_reading import Reader
from prorl_hpc.rollout.journal_records import CarriedGroup, OpenBatch, OpenRollout
from prorl_hpc.rollout.journal_shelf import DatabaseThread, Shelf, ShelfLimits
from prorl_hpc.rollout.policy_figures import PolicyFigures
from prorl_hpc.service.errors import invalid

_encoder = msgspec.msgpack.Encoder()
_progress = msgspec.msgpack.Decoder(BatchProgress)


class Journal:
    """``open`` makes one. For one event loop."""

    def __init__(self, path: Path, store: RolloutStore | None) -> None:
        """Use ``open``."""
        self.failed: asyncio.Future[RunError] = asyncio.get_running_loop().create_future()
        """Done, with the error, when the journal can record nothing more."""
        self.on_commit: Callable[[float], None] = lambda seconds: None
        """Told of every commit, with the seconds that it took."""
        self.cut_off = False
        """What is open was left by another attempt of the run, and ``begin_attempt`` was not called yet."""
        self._path = path
        self._store = store
        self._newest = 0
        self._grown = asyncio.Event()
        self._closing = False
        self._thread: DatabaseThread
        self._shelf: Shelf
        self._reader: Reader
        self._shelving: asyncio.Task[None]

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        epoch: str,
        attempt: int = 1,
        store: RolloutStore | None,
        limits: ShelfLimits | None = None,
    ) -> Journal:
        """Open or create (mode 0600) the journal. ``epoch`` is a token: another than last time begins a new epoch.
        ``attempt``: of the run. ``store`` None: only the newest trajectories are kept, in the journal. Raises RunError
        if another process has it, or it is of a newer version."""
        journal = cls(path, store)
        database: list[Database] = []

        def opened() -> Database:
            database.append(open_database(path, epoch, attempt, node_name()))
            return database[0]

        journal._thread = DatabaseThread(
            open_database=opened,
            connection=lambda db: db.connection,
            write_items=results.write_items,
            newest=lambda db: db.newest,
            committed=journal._committed,
            failed=journal._fail,
        )
        await journal._thread.start()
        journal._newest = database[0].newest
        journal.cut_off = database[0].cut_off
        journal._reader = Reader(journal._thread, store)
        journal._shelf = Shelf(journal._thread, store, limits or ShelfLimits())
        journal._shelving = asyncio.create_task(journal._shelf.run(), name="journal shelf")
        journal._shelving.add_done_callback(journal._shelf_ended)
        return journal

    async def close(self, *, goes_on: bool = False) -> None:
        """Everything recorded is on disk, and in Parquet, but with ``goes_on`` not what belongs to an open batch: that
        will be in the batch's own file. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._shelf.stop(leave_open_batches=goes_on)
        await asyncio.wait([self._shelving])
        await self._thread.close()
        self._grown.set()
        if not self.failed.done():
            await asyncio.to_thread(holder_file(self._path).unlink, missing_ok=True)

    # orders

    async def recover(self) -> tuple[list[OpenBatch | OpenRollout], bool]:
        """This epoch's open orders in order of acceptance, and whether admission was paused."""
        return await self._thread.call(orders.recover, writes=False)

    async def begin_attempt(self, unfinished: Sequence[Unfinished], asleep: Sequence[str]) -> None:
        """Note, all at once, how this attempt of the run takes up what another left, and the batches that are asleep."""
        await self._thread.call(partial(orders.begin_attempt, unfinished=unfinished, asleep=asleep))
        self.cut_off = False

    def woken(self, batch_id: str) -> asyncio.Future[None]:
        """It is asleep no more."""
        return self._thread.call(partial(orders.woken, batch_id=batch_id))

    async def flush(self) -> None:
        """What was asked for until now is on disk."""
        await self._thread.call(lambda db: None)

    async def accept_batch(self, spec: BatchSpec, carried: Sequence[CarriedGroup] = (), closes: str = "") -> bool:
        """True if it is new, False if this very order is known. Raises Refusal 409 ``batch_differs``, and 400 for an
        id that cannot name a file. ``closes``: the batch whose groups are hereby taken over; it is closed, and the
        results of the ``carried`` rollouts belong to this batch from now on. RunError if that one has no result."""
        self._require_file_name(spec.batch_id)
        return await self._thread.call(partial(orders.accept_batch, spec=spec, carried=carried, closes=closes))

    async def require_free(self, batch_id: str) -> None:
        """Raises what ``accept_batch`` would raise for the id of a new batch."""
        self._require_file_name(batch_id)
        await self._thread.call(partial(orders.require_free, batch_id=batch_id), writes=False)

    async def accept_rollouts(self, specs: Sequence[RolloutSpec]) -> list[bool]:
        """All or, with an error, none; True for each that is new. Raises Refusal 409 ``rollout_differs``."""
        return await self._thread.call(partial(orders.accept_rollouts, specs=specs))

    def note_attempt(self, rollout_id: str, attempt: int, spared: int = 0) -> None:
        self._thread.add_silently(results.AttemptNoted(rollout_id, attempt, spared))

    def cancelled_batch(self, batch_id: str) -> asyncio.Future[None]:
        return self._thread.call(partial(orders.cancelled_batch, batch_id=batch_id))

    def finish_batch(self, result: BatchResult, *, keeps_open: bool) -> asyncio.Future[None]:
        """``result`` has slim results. ``keeps_open``: groups that it carries on are still to be taken over. RunError
        if the batch is not running."""
        future = self._thread.call(partial(orders.finish_batch, result=result, keeps_open=keeps_open))
        future.add_done_callback(lambda _: self._shelf.wake())
        return future

    def set_paused(self, on: bool) -> asyncio.Future[None]:
        return self._thread.call(partial(orders.set_paused, on=on))

    # results

    def record(
        self, result: RolloutResult, trajectory: msgspec.Raw | bytes | None, batch_id: str
    ) -> asyncio.Future[int]:
        """``result`` is slim: its trajectory is given apart, as msgpack, or None. ``batch_id`` empty: a single
        rollout. The cursor, once it is on disk; that of the first result if the rollout has one already."""
        slim = _encoder.encode(result)
        size = 0 if trajectory is None else len(memoryview(trajectory))
        item = results.Ended(result.rollout_id, batch_id, result.policy, result.status.value, slim, trajectory, size)
        if not batch_id:
            self._shelf.single_recorded(size)
        return self._thread.add(item, size + len(slim))

    @property
    def newest_cursor(self) -> int:
        """Of the results on disk; 0 if there is none."""
        return self._newest

    async def wait_beyond(self, cursor: int, wait_s: float) -> None:
        """Until there is a result behind ``cursor``, for at most ``wait_s`` seconds. Raises RunError if the journal
        fails."""
        try:
            async with asyncio.timeout(wait_s):
                while self._newest <= cursor and not self._closing:
                    if self.failed.done():
                        raise self.failed.result()
                    await self._grown.wait()
        except TimeoutError:
            return

    async def rollout_progress(self, rollout_id: str) -> RolloutProgress | None:
        """Of a rollout that has ended; None of another."""
        return await self._thread.call(partial(results.progress, rollout_id=rollout_id), writes=False)

    async def ended(
        self, status: Status | None, batch_id: str, policy: str, after: str, limit: int
    ) -> list[RolloutProgress]:
        """Rollouts in the order of their end. Raises Refusal 404 if ``after`` has not ended."""
        list_them = partial(results.ended, status=status, batch_id=batch_id, policy=policy, after=after, limit=limit)
        return await self._thread.call(list_them, writes=False)

    async def ended_counts(self) -> dict[Status, int]:
        """How many rollouts of this epoch ended how."""
        return await self._thread.call(results.ended_counts, writes=False)

    async def ended_figures(self, policies: Sequence[str]) -> PolicyFigures:
        """What the rollouts of this epoch that ended came to, by policy."""
        return await self._thread.call(partial(results.ended_figures, policies=policies), writes=False)

    async def batches(self, after: str, limit: int) -> list[str]:
        """Ids in order of acceptance, in whatever state. Raises Refusal 404 if ``after`` is unknown."""
        return await self._thread.call(partial(orders.batches, after=after, limit=limit), writes=False)

    async def batch_state(self, batch_id: str) -> BatchProgress | None:
        """Of a batch that has a result; None of another."""
        column = partial(orders.batch_column, batch_id=batch_id, column="progress")
        blob = await self._thread.call(column, writes=False)
        return None if blob is None else _progress.decode(blob)

    async def batch_result(self, batch_id: str) -> BatchResult | None:
        """With trajectories; None of a batch without a result. Raises Refusal 410 ``result_gone``."""
        return await self._reader.batch_result(batch_id)

    async def rollout_result(self, rollout_id: str) -> RolloutResult | None:
        """With its trajectory; None of one that has not ended. Raises Refusal 410 ``result_gone``."""
        return await self._reader.rollout_result(rollout_id)

    async def results(self, cursor: int, limit: int, batch_id: str, policy: str = "") -> list[NumberedResult]:
        """Results behind ``cursor`` with trajectories, in the order of recording: at most ``limit``, and fewer if
        they are large, but one at least if there is one. Raises Refusal 410 ``result_gone``."""
        return await self._reader.results(cursor, limit, batch_id, policy)

    async def waiting(self) -> tuple[int, int]:
        """How many trajectories wait in the journal to be moved to Parquet (or are kept there), and their bytes."""
        return await self._thread.call(shelving.waiting, writes=False)

    def _require_file_name(self, batch_id: str) -> None:
        if self._store is not None:
            try:
                self._store.path(batch_id)
            except ValueError as error:
                raise invalid(str(error), "$.batch_id") from error

    def _committed(self, newest: int, seconds: float) -> None:
        self.on_commit(seconds)
        if newest > self._newest:
            self._newest = newest
            self._grown.set()
            self._grown = asyncio.Event()

    def _fail(self, error: RunError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._grown.set()
        self._grown = asyncio.Event()

    def _shelf_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        failure = RunError(
            f"trajectories cannot be written to Parquet: {error}. Free space in the run directory, "
            "or set rollout.keep_trajectories=false"
        )
        failure.__cause__ = error
        self._fail(error if isinstance(error, RunError) else failure)
