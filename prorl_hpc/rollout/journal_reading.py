"""Results with their trajectories, from the journal or from Parquet; decoded off the event loop, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from prorl_hpc.messages.batch import BatchResult
from prorl_hpc.messages.rollout import NumberedResult, RolloutResult
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout import journal_orders as orders
from prorl_hpc.rollout import journal_results as results
from prorl_hpc.rollout.journal_results import FETCH_ROLLOUTS, Stored
from prorl_hpc.rollout.journal_shelf import DatabaseThread, decode_stored, decode_trajectory
from prorl_hpc.service.errors import Refusal

_PAGE_BYTES = 32 << 20
_batch_result = msgspec.msgpack.Decoder(BatchResult)


class Reader:
    def __init__(self, thread: DatabaseThread, store: RolloutStore | None) -> None:
        self._thread = thread
        self._store = store

    async def results(self, cursor: int, limit: int, batch_id: str, policy: str) -> list[NumberedResult]:
        find = partial(results.cursors_after, cursor=cursor, batch_id=batch_id, policy=policy, limit=limit)
        cursors = await self._thread.call(find, writes=False)
        return await self._read(cursors, _PAGE_BYTES)

    async def rollout_result(self, rollout_id: str) -> RolloutResult | None:
        cursors = await self._thread.call(partial(results.cursors_of, rollout_ids=[rollout_id]), writes=False)
        found = await self._read(list(cursors.values()))
        return found[0].result if found else None

    async def batch_result(self, batch_id: str) -> BatchResult | None:
        blob = await self._thread.call(partial(orders.batch_column, batch_id=batch_id, column="result"), writes=False)
        if blob is None:
            return None
        result = await asyncio.to_thread(_batch_result.decode, blob)
        ids = [rollout.rollout_id for group in result.groups for rollout in group.rollouts]
        cursors = await self._thread.call(partial(results.cursors_of, rollout_ids=ids), writes=False)
        # In the order of the batch, which is that of its file.
        read = await self._read([cursors[name] for name in ids if name in cursors])
        full = {numbered.result.rollout_id: numbered.result for numbered in read}
        groups = [
            msgspec.structs.replace(group, rollouts=[full.get(r.rollout_id, r) for r in group.rollouts])
            for group in result.groups
        ]
        return msgspec.structs.replace(result, groups=groups)

    async def _read(self, cursors: Sequence[int], max_bytes: int | None = None) -> list[NumberedResult]:
        """In the given order. Stops early beyond ``max_bytes`` of encoded trajectories."""
        found: list[NumberedResult] = []
        rest, total = list(cursors), 0
        while rest and (max_bytes is None or total < max_bytes):
            piece = await self._thread.call(partial(results.fetch, cursors=rest[:FETCH_ROLLOUTS]), writes=False)
            found += await asyncio.to_thread(_decode, self._store, piece)
            total += sum(stored.size for stored in piece)
            del rest[: len(piece)]
        return found


def _decode(store: RolloutStore | None, piece: list[Stored]) -> list[NumberedResult]:
    shelved = _from_files(store, piece)
    decoded = []
    for stored in piece:
        result = decode_stored(stored)
        trajectory = shelved.get(stored.cursor)
        if trajectory is None:
            trajectory = decode_trajectory(stored, result)
        decoded.append(NumberedResult(stored.cursor, msgspec.structs.replace(result, trajectory=trajectory)))
    return decoded


def _from_files(store: RolloutStore | None, piece: list[Stored]) -> dict[int, Trajectory]:
    by_file: dict[str, list[Stored]] = {}
    for stored in piece:
        if stored.file == "" or (stored.file is not None and store is None):
            raise _gone(stored)
        if stored.file is not None:
            by_file.setdefault(stored.file, []).append(stored)
    found: dict[int, Trajectory] = {}
    for name, there in by_file.items():
        assert store is not None
        try:
            trajectories = store.read(name, [stored.place for stored in there])
        except (OSError, ValueError) as error:
            lost = isinstance(error, FileNotFoundError)
            raise Refusal(
                f"the trajectories in rollouts/{name} of the run directory cannot be read back: {error}",
                code="result_gone" if lost else "result_unreadable",
                status=410 if lost else 500,
                details={"file": name},
            ) from error
        found.update({stored.cursor: trajectory for stored, trajectory in zip(there, trajectories, strict=True)})
    return found


def _gone(stored: Stored) -> Refusal:
    return Refusal(
        f"the trajectory of rollout {stored.rollout_id!r} is no longer kept: set rollout.keep_trajectories=true to keep "
        "all, or ask sooner",
        code="result_gone",
        status=410,
        details={"rollout_id": stored.rollout_id, "cursor": stored.cursor},
    )
