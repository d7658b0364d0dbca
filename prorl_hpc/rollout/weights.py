"""New weights to every LLM server: those that are here now, and those that come late or start anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.service.errors import conflict

_PATIENCE_S = 900.0
"""How long a server that lives may take over one update; one that dies is noticed by its silence."""


class WeightFanOut:
    """Remembers the newest update. ``send`` carries one to a server."""

    def __init__(
        self,
        send: Callable[[str, WeightUpdate], None],
        *,
        first_server_s: float,
        newest: WeightUpdate | None = None,
    ) -> None:
        """``first_server_s``: how long a publication waits when no server has joined yet. ``newest``: what was
        published before this process started."""
        self._send = send
        self._first_server_s = first_server_s
        self._newest = newest
        self._versions: dict[str, int] = {}
        self._asked: dict[str, float] = {}
        """Servers that have not answered the newest update, and since when."""
        self._answers: dict[str, WeightUpdated] = {}
        self._changed = asyncio.Event()
        self._closed = False

    async def publish(self, update: WeightUpdate) -> list[WeightUpdated]:
        """Returns each server's answer, errors inside. The newest version again is answered without a new transfer,
        except to servers that failed. Raises 409 for an older version, 503 if there is no server."""
        self.take_up(update)
        return await self.answers(update)

    async def answers(self, update: WeightUpdate) -> list[WeightUpdated]:
        """Wait for the servers' answers to an update that was taken up."""
        began = time.monotonic()
        while self._asked or not self._answers:
            patience_s = _PATIENCE_S if self._versions else self._first_server_s
            left_s = began + patience_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue
            if self._closed:
                raise ServiceError("the rollout service is shutting down", code="shutting_down", status=503)
            if self._newest is not None and self._newest.version > update.version:
                raise conflict(f"version {self._newest.version} was published meanwhile", "superseded")
        if not self._versions and not self._answers:
            message = f"no LLM server has joined within {self._first_server_s:g} s; the next one gets the weights"
            raise ServiceError(message, code="no_servers", status=503)
        for server_id in tuple(self._asked):
            self._give_up(server_id, "it has not answered")
        return [self._answers[server_id] for server_id in sorted(self._answers)]

    def server_seen(self, server_id: str, version: int, *, joined: bool) -> None:
        """A server joined (perhaps again), or a heartbeat said which version it has."""
        before = self._versions.get(server_id)
        self._versions[server_id] = version
        if self._newest is None or version >= self._newest.version:
            return
        restarted = before is None or version < before
        answer = self._answers.get(server_id)
        failed = answer is not None and bool(answer.error)
        # One that is at work on it is left alone, unless it is a new process, which knows nothing of it.
        if joined or restarted or (server_id not in self._asked and not failed):
            self._ask(server_id)

    def server_lost(self, server_id: str) -> None:
        self._versions.pop(server_id, None)
        if server_id in self._asked:
            self._give_up(server_id, "the server was lost while it loaded them", lost=True)

    def answered(self, answer: WeightUpdated) -> None:
        if self._newest is None or answer.version != self._newest.version:
            return
        self._asked.pop(answer.server_id, None)
        self._answers[answer.server_id] = answer
        if not answer.error:
            self._versions[answer.server_id] = answer.version
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def take_up(self, update: WeightUpdate) -> None:
        """Start to send it. Raises 409 for an older version."""
        newest = self._newest
        if newest is not None and (
            update.version < newest.version or (update.version == newest.version and update != newest)
        ):
            raise conflict(
                f"weights of version {newest.version} were published before: version {update.version} with "
                f"other files is refused, publish {newest.version + 1} or later",
                "stale_version",
                newest=newest.version,
            )
        if newest is None or update.version > newest.version:
            self._newest = update
            self._asked.clear()
            self._answers.clear()
            self._changed.set()
        for server_id, version in self._versions.items():
            answer = self._answers.get(server_id)
            if answer is None and version >= update.version:
                self._answers[server_id] = WeightUpdated(update.version, server_id, 0.0)
            elif server_id not in self._asked and (answer is None or answer.error):
                self._ask(server_id)

    def _ask(self, server_id: str) -> None:
        assert self._newest is not None
        self._answers.pop(server_id, None)
        self._asked[server_id] = time.monotonic()
        self._send(server_id, self._newest)

    def _give_up(self, server_id: str, why: str, *, lost: bool = False) -> None:
        assert self._newest is not None
        seconds = time.monotonic() - self._asked.pop(server_id)
        version = self._newest.version
        error = f"version {version} did not reach {server_id}: {why}"
        self._answers[server_id] = WeightUpdated(version, server_id, seconds, error=error, lost=lost)
        self._changed.set()
