"""The worker's side: each rollout's LLM, over connections to the servers that many rollouts share."""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from prorl_hpc.inference.rollout_llm import Ask, RolloutLLM
from prorl_hpc.inference.server_line import ServerLine
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.inference import Completion, Generate, InferenceToWorker
from prorl_hpc.transport.channels import DealerLine, choose_endpoint
from prorl_hpc.transport.keys import RunKeys

if TYPE_CHECKING:
    from prorl_hpc.inference.outside_client import OutsideClient

_STOPS = "this worker stops"


class LLMClient:
    """Use inside a running event loop, and ``close`` it. ``identity`` names this worker to the servers. A rollout whose
    server does not answer waits ``move_wait_s`` for another one, if somebody is told of the trouble. ``outside_turn_s``: what a server outside the run
    may take for a turn."""

    def __init__(
        self,
        node: str,
        keys: RunKeys,
        identity: str,
        *,
        ping_s: float = 2.0,
        lost_after_s: float = 20.0,
        move_wait_s: float = 30.0,
        outside_turn_s: float = 120.0,
    ) -> None:
        self._node = node
        self._keys = keys
        # a worker that was started anew must not be answered for its predecessor
        self._identity = f"{identity}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._ping_s = ping_s
        self._lost_after_s = lost_after_s
        self._move_wait_s = move_wait_s
        self._outside_turn_s = outside_turn_s
        self._lines: dict[tuple[str, str], ServerLine] = {}
        self._outside: dict[tuple[str, str, str], OutsideClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def for_rollout(
        self,
        server: ServerRef,
        rollout_id: str,
        priority: int = 50,
        trouble: Callable[[str, str], None] | None = None,
    ) -> RolloutLLM:
        """The LLM of one rollout, which sticks to ``server`` until it is moved. ``trouble(server_id, message)`` is told
        when that does not answer. TransportError or InferenceError if it cannot be reached from here."""
        return RolloutLLM(server, rollout_id, priority, self._connect, trouble, self._move_wait_s)

    async def close(self) -> None:
        """Fail what is still waiting, and end the connections."""
        for line in self._lines.values():
            await line.close(_STOPS)
        for outside in self._outside.values():
            await outside.close()
        await asyncio.gather(*self._closing)
        self._lines.clear()
        self._outside.clear()

    def _connect(self, server: ServerRef) -> Ask:
        return self._outside_server(server) if server.url else self._own_server(server).generate

    def _own_server(self, server: ServerRef) -> ServerLine:
        endpoint = choose_endpoint(self._node, server.node, server.ipc, server.tcp)
        key = (server.server_id, endpoint)
        self._end_lost_lines()
        line = self._lines.get(key)
        if line is None:
            dealer: DealerLine[InferenceToWorker] = DealerLine(
                InferenceToWorker, self._keys, endpoint, f"{self._identity}-{next(self._numbers)}"
            )
            line = self._lines[key] = ServerLine(server.server_id, dealer, self._ping_s, self._lost_after_s)
        return line

    def _end_lost_lines(self) -> None:
        for key in [key for key, line in self._lines.items() if line.lost]:
            closing = asyncio.create_task(self._lines.pop(key).close(_STOPS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _outside_server(self, server: ServerRef) -> Ask:
        key = (server.server_id, server.url, server.api_key)
        client = self._outside.get(key)
        if client is None:
            from prorl_hpc.inference.outside_client import OutsideClient  # with aiohttp, which few runs need

            client = self._outside[key] = OutsideClient(
                server.server_id,
                server.url,
                server.api_key,
                ping_s=self._ping_s,
                lost_after_s=self._lost_after_s,
                turn_s=self._outside_turn_s,
            )
        return functools.partial(_ask_outside, client, server)


async def _ask_outside(client: OutsideClient, server: ServerRef, request: Generate) -> Completion:
    return await client.generate(request, server.model, server.weight_version, server.vocab_size)
