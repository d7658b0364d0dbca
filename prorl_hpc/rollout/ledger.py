"""What clients have ordered, by the ids that they chose: known again when sent again, waited for, kept for a while."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.service.errors import Refusal, conflict, not_found

R = TypeVar("R")
_encoder = msgspec.msgpack.Encoder(order="deterministic")


@dataclass
class _Entry(Generic[R]):
    digest: bytes
    result: R | None = None
    finished: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Ledger(Generic[R]):
    """Orders of one kind (``batch``, ``rollout``). Results are kept for the newest ``keep_results`` that finished,
    the ids of finished ones for the newest ``keep_ids``."""

    def __init__(self, kind: str, *, keep_results: int, keep_ids: int) -> None:
        self._kind = kind
        self._keep_results = keep_results
        self._keep_ids = keep_ids
        self._entries: dict[str, _Entry[R]] = {}
        self._with_result: deque[str] = deque()
        self._finished: deque[str] = deque()
        self._closed = False

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def is_new(self, name: str, order: Any) -> bool:
        """False if this very order is known. Raises 409 if another order has the id, 503 when closed."""
        entry = self._entries.get(name)
        if entry is None:
            if self._closed:
                raise _shutting_down()
            return True
        if entry.digest != _digest(order):
            raise conflict(
                f"{self._kind} {name!r} was ordered before with other contents: choose a new id",
                f"{self._kind}_differs",
            )
        return False

    def open(self, name: str, order: Any) -> None:
        """Take up a new order."""
        self._entries[name] = _Entry(_digest(order))

    def finish(self, name: str, result: R) -> None:
        entry = self._entries[name]
        entry.result, entry.finished = result, True
        entry.woken.set()
        self._with_result.append(name)
        self._finished.append(name)
        if len(self._with_result) > self._keep_results:
            self._entries[self._with_result.popleft()].result = None
        if len(self._finished) > self._keep_ids:
            del self._entries[self._finished.popleft()]

    def finished(self, name: str) -> bool:
        """Raises 404."""
        return self._entry(name).finished

    def result(self, name: str) -> R | None:
        """The result, None while there is none yet. Raises 404, and 410 for one that is no longer kept."""
        entry = self._entry(name)
        if entry.finished and entry.result is None:
            message = (
                f"the result of {self._kind} {name!r} is no longer kept in memory: batches are in the run directory, "
                "rollouts/<batch_id>.parquet"
            )
            raise Refusal(message, code="result_gone", status=410)
        return entry.result

    async def wait(self, name: str, wait_s: float) -> R | None:
        """``result`` as soon as there is one, or after ``wait_s`` seconds. Raises 503 when the service ends."""
        entry = self._entry(name)
        if not entry.finished and wait_s > 0:
            try:
                await asyncio.wait_for(entry.woken.wait(), wait_s)
            except TimeoutError:
                pass
        if self._closed and not entry.finished:
            raise _shutting_down()
        # Not looked up again by name: whoever waits gets the result even if the id was forgotten meanwhile.
        return entry.result if entry.result is not None else self.result(name)

    def close(self) -> None:
        """The service ends: who waits is told so."""
        self._closed = True
        for entry in self._entries.values():
            entry.woken.set()

    def _entry(self, name: str) -> _Entry[R]:
        entry = self._entries.get(name)
        if entry is None:
            raise not_found(self._kind, name)
        return entry


def _digest(order: Any) -> bytes:
    return hashlib.sha256(_encoder.encode(order)).digest()


def _shutting_down() -> ServiceError:
    return ServiceError("the rollout service is shutting down", code="shutting_down", status=503)
