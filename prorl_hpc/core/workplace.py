"""One worker as the scheduler sees it: which attempts live there, in which slot.

An attempt that is being discarded keeps its slot until the worker says that it is gone: what is still
being torn down takes room as what runs does.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator

from prorl_hpc.core.life import Rank
from prorl_hpc.messages.control import Pools


class Slot(enum.IntEnum):
    """Where an attempt is. RAN has no size of its own; it is bounded by ``sandbox_limit``. FOREIGN is what a worker
    brought along from a time that is not remembered here; nothing is started until it is gone."""

    INIT = 0
    READY = 1
    RUN = 2
    RAN = 3
    EVAL = 4
    FOREIGN = 5


_INIT, _READY, _RUN, _EVAL, _FOREIGN = 0, 1, 2, 4, 5


class Workplace:
    """Slots of one worker. Every attempt here has one sandbox, or is getting or giving up one."""

    def __init__(self, worker_id: str, pools: Pools) -> None:
        self.worker_id = worker_id
        self.pools = pools
        self.draining = False
        self.leaving: set[str] = set()
        """Attempts being discarded."""
        self._slots: dict[str, Slot] = {}
        self._used = [0] * len(Slot)
        self._waiting: dict[Slot, list[tuple[Rank, str]]] = {Slot.READY: [], Slot.RAN: []}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slots))

    def used(self, slot: Slot) -> int:
        return self._used[slot]

    @property
    def pools(self) -> Pools:
        return self._pools

    @pools.setter
    def pools(self, pools: Pools) -> None:
        self._pools = pools
        self._buffer = pools.ready or pools.run
        self.sandbox_limit = pools.run if pools.coupled else pools.ready + 2 * pools.run + pools.eval
        """Sandboxes at once. When EVAL is slow, finished RUNs may pile up to about one more RUN pool, no further."""

    @property
    def room_for_init(self) -> bool:
        used, pools = self._used, self._pools
        if self.draining or used[_FOREIGN] or len(self._slots) >= self.sandbox_limit:
            return False
        return pools.coupled or (used[_INIT] < pools.init and self._buffered < self._buffer)

    @property
    def room_for_run(self) -> bool:
        return not self._used[_FOREIGN] and (self._pools.coupled or self._used[_RUN] < self._pools.run)

    @property
    def room_for_eval(self) -> bool:
        return not self._used[_FOREIGN] and (self._pools.coupled or self._used[_EVAL] < self._pools.eval)

    @property
    def load(self) -> tuple[float, float]:
        """How full its buffer of prepared sandboxes is, then how full it is at all."""
        return self._buffered / (self._buffer or 1), len(self._slots) / (self.sandbox_limit or 1)

    @property
    def _buffered(self) -> int:
        """What an INIT has to find room beside: without a buffer all that a RUN slot is taken by or meant for."""
        used = self._used
        return used[_INIT] + used[_READY] + (0 if self._pools.ready else used[_RUN])

    def put(self, attempt_id: str, slot: Slot, rank: Rank | None = None) -> None:
        """Add an attempt or move it; with ``rank`` it waits there for the next stage."""
        before = self._slots.get(attempt_id)
        if before is not None:
            self._used[before] -= 1
        if self.leaving:
            self.leaving.discard(attempt_id)
        self._slots[attempt_id] = slot
        self._used[slot] += 1
        if rank is not None:
            heapq.heappush(self._waiting[slot], (rank, attempt_id))

    def remove(self, attempt_id: str) -> None:
        slot = self._slots.pop(attempt_id, None)
        if slot is not None:
            self._used[slot] -= 1
        if self.leaving:
            self.leaving.discard(attempt_id)

    def next_waiting(self, slot: Slot) -> str | None:
        """Take the first attempt that waits in ``slot`` out of its queue (not out of the slot); None if none does."""
        queue = self._waiting[slot]
        while queue:
            _, attempt_id = heapq.heappop(queue)
            if self._slots.get(attempt_id) is slot and attempt_id not in self.leaving:
                return attempt_id
        return None
