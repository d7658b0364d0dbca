"""One rollout's LLM: it sticks to its server, and moves to another one when it is told to.

A request that meets a move begins anew on the new server: its prompt is all that the rollout has so far, so no token
is lost but those of the turn that was being written.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import InferenceError, TransportError
from prorl_hpc.messages.inference import Completion, FinishReason, Generate
from prorl_hpc.messages.rollout import SamplingParams

Ask: TypeAlias = Callable[[Generate], Coroutine[Any, Any, Completion]]
"""Ask one server; cancelling it ends the request there. Raises ServerDown or InferenceError."""

_SERVERS_TRIED = 3
"""A request that so many servers broke on is perhaps what breaks them."""


@dataclass(eq=False)
class _Place:
    """Where the rollout is. ``left`` is set when it moves away. ``gone``: why there is no server for it."""

    server: ServerRef
    ask: Ask | None
    gone: str = ""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[asyncio.Task[Completion]] = field(default_factory=set)
    waiting: int = 0
    """Requests that failed here and wait for a move."""


class RolloutLLM:
    """tasks.protocol.LLM. ``connect`` may raise TransportError. ``trouble(server_id, message)`` is called when the
    server does not answer, and ``move`` is waited for ``move_wait_s``; without it that is an InferenceError at once."""

    def __init__(
        self,
        server: ServerRef,
        rollout_id: str,
        priority: int,
        connect: Callable[[ServerRef], Ask],
        trouble: Callable[[str, str], None] | None,
        move_wait_s: float,
    ) -> None:
        self._rollout_id = rollout_id
        self._priority = priority
        self._connect = connect
        self._trouble = trouble
        self._move_wait_s = move_wait_s
        self._place = _Place(server, connect(server))

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """See the protocol. InferenceError with the first server's message if no other one takes over."""
        troubles: list[str] = []
        while True:
            place = self._place
            if place.ask is None:
                raise InferenceError(troubles[0] if troubles else place.gone)
            request_id = f"{self._rollout_id}-{secrets.token_hex(6)}"
            request = Generate(request_id, self._rollout_id, list(token_ids), sampling, self._priority)
            try:
                completion = await self._attempt(place, place.ask, request)
            except ServerDown as down:
                troubles.append(str(down))
                if self._trouble is None:
                    raise
                if len(troubles) == _SERVERS_TRIED:
                    raise InferenceError(f"{troubles[0]} (servers that failed this request: {len(troubles)})") from down
                await self._wait_for_move(place, self._trouble, troubles)
            else:
                if completion is not None:
                    return completion

    def move(self, server: ServerRef | None) -> None:
        """Go on at ``server``, with what is in flight too; None: there is none, and what is in flight fails. The server
        that it already has changes nothing, but for a request that failed there: that is tried again."""
        old = self._place
        if server == old.server and not old.gone and not old.waiting:
            return
        if server is None:
            gone = f"LLM server {old.server.server_id} is lost to rollout {self._rollout_id}, and no other takes over"
            self._place = _Place(old.server, None, gone)
        else:
            try:
                self._place = _Place(server, self._connect(server))
            except (TransportError, InferenceError) as error:
                self._place = _Place(server, None, f"cannot move to LLM server {server.server_id}: {error}")
        if server == old.server:
            self._place.requests |= old.requests  # they go on, and another move ends them
        else:
            for task in old.requests:
                task.cancel()
        old.left.set()

    async def _attempt(self, place: _Place, ask: Ask, request: Generate) -> Completion | None:
        """None: it was moved away. An end that nobody here asked for is the server's fault."""
        asking = asyncio.create_task(ask(request))
        place.requests.add(asking)
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()  # does nothing unless this rollout is being cancelled
            for holder in (place, self._place):
                holder.requests.discard(asking)
        if asking.cancelled():
            return None
        completion = asking.result()
        if completion.finish_reason is FinishReason.ABORT and self._trouble is not None:
            raise ServerDown(f"LLM server {place.server.server_id} broke off after {len(completion.token_ids)} tokens")
        return completion

    async def _wait_for_move(self, place: _Place, trouble: Callable[[str, str], None], troubles: list[str]) -> None:
        if place.left.is_set():
            return  # the coordinator was faster
        place.waiting += 1
        try:
            if place.waiting == 1:
                trouble(place.server.server_id, troubles[-1])
            async with asyncio.timeout(self._move_wait_s):
                await place.left.wait()
        except TimeoutError:
            raise InferenceError(
                f"{troubles[0]}; the coordinator named no other server within {self._move_wait_s:g} s"
            ) from None
        finally:
            place.waiting -= 1
