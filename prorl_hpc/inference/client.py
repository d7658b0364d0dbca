"""The worker's side: each rollout's LLM, over one line per inference agent that many rollouts share.

A coroutine that is cancelled ends its request on the server. A server that is gone, or was started anew,
fails what waits for it: every generate ends in a Completion or an InferenceError.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prorl_hpc.messages.control import ServerRef
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
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.channels import DealerLine, choose_endpoint
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger(__name__)


class LLMClient:
    """Use inside a running event loop, and ``close`` it. ``identity`` names this worker to the servers."""

    def __init__(
        self, node: str, keys: RunKeys, identity: str, *, ping_s: float = 2.0, lost_after_s: float = 20.0
    ) -> None:
        self._node = node
        self._keys = keys
        # a worker that was started anew must not be answered for its predecessor
        self._identity = f"{identity}-{secrets.token_hex(4)}"
        self._ping_s = ping_s
        self._lost_after_s = lost_after_s
        self._lines: dict[tuple[str, str], _ServerLine] = {}

    def for_rollout(self, server: ServerRef, rollout_id: str, priority: int = 50) -> RolloutLLM:
        """The LLM of one rollout, which sticks to ``server``. TransportError if it cannot be reached from here."""
        endpoint = choose_endpoint(self._node, server.node, server.ipc, server.tcp)
        line = self._lines.get((server.server_id, endpoint))
        if line is None or line.lost:
            dealer: DealerLine[InferenceToWorker] = DealerLine(
                InferenceToWorker, self._keys, endpoint, f"{self._identity}-{len(self._lines)}"
            )
            line = _ServerLine(server.server_id, dealer, self._ping_s, self._lost_after_s)
            self._lines[server.server_id, endpoint] = line
        return RolloutLLM(line, rollout_id, priority)

    async def close(self) -> None:
        """Fail what is still waiting, and end the lines."""
        for line in self._lines.values():
            await line.close("this worker stops")
        self._lines.clear()


@dataclass(frozen=True)
class RolloutLLM:
    """tasks.protocol.LLM over ZeroMQ."""

    _line: _ServerLine
    _rollout_id: str
    _priority: int

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        request_id = f"{self._rollout_id}-{secrets.token_hex(6)}"
        request = Generate(request_id, self._rollout_id, list(token_ids), sampling, self._priority)
        return await self._line.generate(request)


class _ServerLine:
    """One line: sends requests, hands out the answers, and watches that the server lives while it is waited for."""

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
        if self.lost:
            raise InferenceError(f"{self._server_id} is lost")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        try:
            await self._line.send(request)
            return await answer
        except asyncio.CancelledError:
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
            self._fail(str(error))
            self.lost = True

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
            case InferenceFailed(message=text):
                answer.set_exception(InferenceError(text))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if not self._waiting:
                self._pings_unanswered = 0
            elif self._pings_unanswered >= self._pings_allowed:
                self._fail(f"it has not answered {self._pings_unanswered} pings, {self._ping_s:g} s apart")
                self.lost = True
                return
            else:
                self._pings_unanswered += 1
                await self._line.send(Ping())

    def _fail(self, why: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(InferenceError(f"LLM server {self._server_id} at {self._line.endpoint}: {why}"))

    def _send_soon(self, message: Any) -> None:
        """Send from a task of its own: the caller is being cancelled."""
        task = asyncio.create_task(self._line.send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self, why: str) -> None:
        self.lost = True
        for request_id in self._waiting:
            await self._line.send(Abort(request_id))
        self._fail(why)
        await asyncio.gather(*self._sending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._line.close()
