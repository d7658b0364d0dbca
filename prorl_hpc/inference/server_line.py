"""A worker's line to one inference agent of the run: many rollouts share it.

It hands out the answers, and watches that the server lives while it is waited for. A server that is gone, or was started
anew, fails what waits for it: every generate ends in a Completion or an InferenceError.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.messages.errors import InferenceError, TransportError
from prorl_hpc.messages.inference import (
    Abort,
    Completion,
    Generate,
    Generated,
    InferenceFailed,
    InferenceToWorker,
    Ping,
    Pong,
)
from prorl_hpc.transport.channels import DealerLine


class ServerLine:
    """Owns ``line``. ``lost``: it is of no use any more and fails all that is asked; close it and make another."""

    def __init__(self, server_id: str, line: DealerLine[InferenceToWorker], ping_s: float, lost_after_s: float) -> None:
        self._server_id = server_id
        self._line = line
        self._ping_s = ping_s
        self._pings_allowed = max(1, round(lost_after_s / ping_s))
        self._pings_unanswered = 0
        self._instance = ""
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self.lost = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(self, request: Generate) -> Completion:
        """ServerDown, or InferenceError for a request that the server refuses."""
        if self.lost:
            raise ServerDown(f"{self._server_id} is lost")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        try:
            await self._line.send(request)
            return await answer
        except TransportError as error:
            raise InferenceError(f"the request does not go out to {self._server_id}: {error}") from error
        except (asyncio.CancelledError, ServerDown):
            # also where the server seems to be gone: if it is not, it would go on generating for nobody
            self._send_soon(Abort(request.request_id))
            raise
        finally:
            del self._waiting[request.request_id]

    async def _read(self) -> None:
        try:
            async for message in self._line.messages():
                self._pings_unanswered = 0
                self._take(message)
        except TransportError as error:
            self._lose(str(error))

    def _take(self, message: InferenceToWorker) -> None:
        if isinstance(message, Pong):
            if self._instance not in ("", message.instance):
                self._fail("it was started anew and has forgotten this request")
            self._instance = message.instance
            return
        answer = self._waiting.get(message.request_id)
        if answer is None or answer.done():
            return  # it was cancelled here meanwhile
        match message:
            case Generated(completion=completion):
                answer.set_result(completion)
            case InferenceFailed(message=text, server_down=down):
                answer.set_exception(ServerDown(text) if down else InferenceError(text))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if not self._waiting:
                self._pings_unanswered = 0
                self._instance = ""  # one that is started anew meanwhile forgets nothing of ours
            elif self._pings_unanswered >= self._pings_allowed:
                self._lose(f"it has not answered {self._pings_unanswered} pings, {self._ping_s:g} s apart")
                return
            else:
                self._pings_unanswered += 1
                await self._line.send(Ping())

    def _lose(self, why: str) -> None:
        self.lost = True
        self._fail(why)

    def _fail(self, why: str, kind: type[InferenceError] = ServerDown) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(kind(f"LLM server {self._server_id} at {self._line.endpoint}: {why}"))

    def _send_soon(self, message: Any) -> None:
        """Send from a task of its own: the caller is being cancelled."""
        task = asyncio.create_task(self._line.send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self, why: str) -> None:
        """Abort and fail what waits, and end the line."""
        self.lost = True
        for request_id in self._waiting:
            await self._line.send(Abort(request_id))
        self._fail(why, InferenceError)
        await asyncio.gather(*self._sending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._line.close()
