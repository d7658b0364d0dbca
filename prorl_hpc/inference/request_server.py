"""Answers the workers that knock at an inference agent's door: tokens in, tokens out.

Every Generate is answered by Generated or InferenceFailed, unless its worker has vanished: then it is ended in
the engine and forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prorl_hpc.inference.priority_gate import PriorityGate
from prorl_hpc.inference.protocol import BadAnswer, Engine, ServerDown
from prorl_hpc.inference.request_records import RequestRecords
from prorl_hpc.inference.soundness import check_completion
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import (
    Abort,
    Completion,
    FinishReason,
    Generate,
    Generated,
    InferenceFailed,
    Ping,
    Pong,
    WorkerToInference,
)
from prorl_hpc.transport.channels import RouterDoor

log = logging.getLogger(__name__)

_TICKS_TO_LOSE = 8


@dataclass
class _Active:
    """A request being served. ``in_engine`` once it has passed the gate."""

    task: asyncio.Task[None]
    in_engine: bool = False
    aborted: bool = False


class RequestServer:
    """At most ``max_parallel`` requests are in the engine; the others wait here, by priority. A worker from which
    nothing is heard for ``lost_after_s`` has vanished."""

    def __init__(
        self,
        server_id: str,
        engine: Engine,
        door: RouterDoor[WorkerToInference],
        max_parallel: int,
        lost_after_s: float,
        instance: str,
        on_bad_answer: Callable[[str], None],
        records: RequestRecords | None = None,
    ) -> None:
        """``instance`` names this process, as in Pong. ``on_bad_answer`` is told of an answer that was refused.
        ``records``: where what each request cost is written."""
        self._server_id = server_id
        self._on_bad_answer = on_bad_answer
        self._engine = engine
        self._door = door
        self._gate = PriorityGate(max_parallel)
        self._lost_after_s = lost_after_s
        self._pong = Pong(instance)
        self._records = records
        self._active: dict[tuple[bytes, str], _Active] = {}
        self._silent_ticks: dict[bytes, int] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return self._gate.waiting

    async def serve(self) -> None:
        """For ever; cancel it to end. What is under way then is answered with InferenceFailed."""
        reaper = asyncio.create_task(self._reap())
        try:
            async for peer, message in self._door.messages():
                self._silent_ticks[peer] = 0
                match message:
                    case Generate():
                        self._accept(peer, message)
                    case Abort():
                        self._abort(peer, message.request_id)
                    case Ping():
                        await self._door.send(peer, self._pong)
        finally:
            reaper.cancel()
            await self._end_all()

    def _accept(self, peer: bytes, request: Generate) -> None:
        key = (peer, request.request_id)
        if key in self._active:
            log.error("%r sent request %s twice: the second is ignored", peer, request.request_id)
            return
        self._active[key] = _Active(asyncio.create_task(self._answer(peer, request)))

    async def _answer(self, peer: bytes, request: Generate) -> None:
        key = (peer, request.request_id)
        try:
            asked = time.monotonic()
            async with self._gate.slot(request.priority):
                self._active[key].in_engine = True
                completion = await self._generate(request, time.monotonic() - asked)
            check_completion(completion, self._engine.model.vocab_size, self._server_id, request.sampling.max_tokens)
            answer: Any = Generated(request.request_id, completion)
        except InferenceError as error:
            if isinstance(error, BadAnswer):
                self._on_bad_answer(str(error))
            answer = InferenceFailed(request.request_id, str(error), server_down=isinstance(error, ServerDown))
        except asyncio.CancelledError:
            if not self._active[key].aborted:
                raise
            answer = Generated(request.request_id, Completion([], [], FinishReason.ABORT, []))
        except Exception as error:
            log.exception("request %s", request.request_id)
            answer = InferenceFailed(request.request_id, f"{type(error).__name__}: {error}")
        finally:
            del self._active[key]
        await self._door.send(peer, answer)

    async def _generate(self, request: Generate, queued_s: float) -> Completion:
        opened = self._records.begin() if self._records is not None else None
        try:
            completion = await self._engine.generate(
                request.request_id, request.token_ids, request.sampling, request.priority
            )
            if opened is not None:
                opened.answer = completion
            return completion
        finally:
            if self._records is not None and opened is not None:
                self._records.end(opened, len(request.token_ids), queued_s)

    def _abort(self, peer: bytes, request_id: str) -> None:
        active = self._active.get((peer, request_id))
        if active is None or active.aborted:
            return  # it ended meanwhile
        active.aborted = True
        if not active.in_engine:
            active.task.cancel()
            return
        task = asyncio.create_task(self._abort_in_engine(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_in_engine(self, request_id: str) -> None:
        try:
            await self._engine.abort(request_id)
        except InferenceError as error:
            log.warning("cannot abort request %s: %s", request_id, error)

    async def _reap(self) -> None:
        """End the requests of workers that have vanished. Silence is counted in ticks: a pause of this whole
        process, during which nobody was read, accuses nobody."""
        while True:
            await asyncio.sleep(self._lost_after_s / _TICKS_TO_LOSE)
            waited_by = {peer for peer, _ in self._active}
            self._silent_ticks = {peer: self._silent_ticks[peer] + 1 for peer in waited_by}
            for peer, ticks in self._silent_ticks.items():
                if ticks <= _TICKS_TO_LOSE:
                    continue
                lost = [active for (owner, _), active in self._active.items() if owner == peer]
                log.warning("worker %r has vanished: ending its %d requests", peer.decode(errors="replace"), len(lost))
                for active in lost:
                    active.task.cancel()

    async def _end_all(self) -> None:
        tasks = [active.task for active in self._active.values()]
        for peer, request_id in list(self._active):
            await self._door.send(
                peer, InferenceFailed(request_id, "the LLM server is being stopped", server_down=True)
            )
        for task in (*tasks, *self._aborts):
            task.cancel()
        await asyncio.gather(*tasks, *self._aborts, return_exceptions=True)
