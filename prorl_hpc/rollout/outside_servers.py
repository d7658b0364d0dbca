"""LLM servers that are not of this run: registered by a client, probed, watched, remembered over a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from prorl_hpc.config.schema import TRAINED
from prorl_hpc.core.events import Event, ServerLost, ServerSeen
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import ConfigError, InferenceError, RunError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.messages.status import ServerStatus
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.service.errors import Refusal, conflict, not_found

log = logging.getLogger(__name__)

_LOOK_S = 10.0
_LOOKS_TO_GENERATE = 6
_RETRY_S = 1.0
_MAY_BE_STARTING = "may_be_starting"
"""In the details of a refusal: whether to ask again makes sense."""
API_KEY = "PRORL_OUTSIDE_API_KEY"
"""In the environment: the bearer token for the servers of engine.outside and policies.NAME.outside."""


def configured_servers(urls: list[str], api_key: str = "", policy: str = TRAINED) -> list[OutsideServer]:
    """The servers of ``engine.outside``, as ``outside-0``, ``outside-1``, …, or of another policy, as ``outside-NAME-0``, … A
    URL may end in ``#MODEL``: which of its models is meant; without a path it is that of an OpenAI server (``/v1``). Raises
    ConfigError for a server named twice."""
    servers: list[OutsideServer] = []
    for url in urls:
        address, _, model = url.partition("#")
        address = address.rstrip("/")
        if address.startswith("http") and not urlsplit(address).path:
            address += "/v1"
        server_id = f"outside-{len(servers)}" if policy == TRAINED else f"outside-{policy}-{len(servers)}"
        server = OutsideServer(server_id, address, model, policy, api_key=api_key)
        if any(other.url == address for other in servers):
            raise ConfigError(f"{_setting_of(server)}: {address} is named twice: every server must be named once")
        servers.append(server)
    return servers


async def join_at_start(
    servers: list[OutsideServer],
    add: Callable[[OutsideServer], Awaitable[object]],
    say: Callable[[str], None],
    limit_s: float = 30.0,
) -> None:
    """Register all of them; one that does not answer is asked again for ``limit_s``, for it may just be starting. Raises
    RunError, with the reasons of all that did not join, as soon as waiting helps no more."""
    deadline = time.monotonic() + limit_s
    missing: dict[str, str] = {}

    async def join(server: OutsideServer) -> None:
        while True:
            try:
                await add(server)
            except Refusal as refusal:
                missing[server.server_id] = f"{_setting_of(server)}: {refusal}"
                if not refusal.details.get(_MAY_BE_STARTING) or time.monotonic() > deadline:
                    raise
                say(f"waiting for {server.url}: {refusal}")
            else:
                missing.pop(server.server_id, None)
                return
            await asyncio.sleep(_RETRY_S)

    joining = [asyncio.create_task(join(server)) for server in servers]
    try:
        await asyncio.gather(*joining)
    except Refusal as refusal:
        raise RunError("; ".join(missing.values())) from refusal
    finally:
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)


def _setting_of(server: OutsideServer) -> str:
    return "engine.outside" if server.policy == TRAINED else f"policies.{server.policy}.outside"


@dataclass
class _Outside:
    server: OutsideServer
    ref: ServerRef
    healthy: bool = True
    detail: str = ""
    looks: int = 0
    doubted: bool = False
    """A rollout had trouble with it since it was asked to generate."""
    looking: bool = False


class OutsideServers:
    """``tell`` gives an event to the scheduler; ``newest`` says a policy's newest weight version, ``model_path`` its model
    directory; ``assigned`` and ``draining`` what the scheduler has of a server; ``turn_s`` how long a turn may take."""

    def __init__(
        self,
        keepsakes: Keepsakes,
        tell: Callable[[Event], object],
        newest: Callable[[str], int],
        model_path: Callable[[str], Path | None] = lambda policy: None,
        turn_s: float = 120.0,
    ) -> None:
        self._keepsakes = keepsakes
        self._tell = tell
        self._newest = newest
        self._model_path = model_path
        self._turn_s = turn_s
        self._servers: dict[str, _Outside] = {}

    def __contains__(self, server_id: str) -> bool:
        return server_id in self._servers

    async def add(self, server: OutsideServer) -> None:
        """Probe and register; nothing is done for one that is known. Raises 409 for another under the same id, 422 if it
        will not do."""
        known = self._servers.get(server.server_id)
        if known is not None:
            if known.server != server:
                message = f"LLM server {server.server_id!r} is registered with other settings: remove it first"
                raise conflict(message, "server_differs")
            return
        from prorl_hpc.inference.outside_probe import Unready, probe  # with aiohttp, which few runs need

        try:
            probed = await probe(server, self._model_path(server.policy))
        except InferenceError as error:
            details = {_MAY_BE_STARTING: isinstance(error, Unready)}
            raise Refusal(str(error), code="server_unfit", status=422, details=details) from error
        self._join(server, probed.model, probed.vocab_size)
        self._keepsakes.add_outside(server)
        log.info("LLM server %s joined from outside, at %s", server.server_id, server.url)

    def remove(self, server_id: str) -> None:
        """Raises 404."""
        if self._servers.pop(server_id, None) is None:
            raise not_found("server", server_id)
        self._keepsakes.remove_outside(server_id)
        self._tell(ServerLost(server_id, "it was removed"))

    def restore(self) -> None:
        """Those that an earlier process of this job had; whether they live is seen later."""
        for server in self._keepsakes.outside.values():
            self._join(server, server.model)

    def doubt(self, server_id: str) -> None:
        """A rollout had trouble with it: it has to generate at the next look. Nothing is done for a server not from here."""
        if (outside := self._servers.get(server_id)) is not None:
            outside.doubted = True

    def follow(self, policy: str) -> None:
        """The policy has newer weights: servers whose version nobody named pass for as new."""
        for outside in self._servers.values():
            if outside.server.policy == policy and outside.server.weight_version is None:
                outside.ref = replace(outside.ref, weight_version=self._newest(policy))
                self._tell(ServerSeen(outside.ref, outside.ref.weight_version, outside.healthy))

    def statuses(self, assigned: Callable[[str], int], draining: Callable[[str], bool]) -> list[ServerStatus]:
        return [
            ServerStatus(
                server_id=server_id,
                node="",
                engine="outside",
                model=outside.ref.model,
                healthy=outside.healthy,
                weight_version=outside.ref.weight_version,
                assigned=assigned(server_id),
                running=0,
                waiting=0,
                generated_tokens=0,
                tokens_per_s=0.0,
                detail=outside.detail,
                policy=outside.ref.policy,
                draining=draining(server_id),
                url=outside.ref.url,
            )
            for server_id, outside in sorted(self._servers.items())
        ]

    async def watch(self) -> None:
        """Look now and then whether they live, for ever. One that takes its time keeps nobody from the others."""
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(_LOOK_S)
                for outside in self._servers.values():
                    if not outside.looking:
                        outside.looking = True
                        looks.create_task(self._look(outside))

    def _join(self, server: OutsideServer, model: str, vocab_size: int = 0) -> None:
        version = self._newest(server.policy) if server.weight_version is None else server.weight_version
        ref = ServerRef(
            server.server_id,
            node="",
            ipc="",
            tcp="",
            policy=server.policy,
            url=server.url,
            model=model,
            api_key=server.api_key,
            weight_version=version,
            vocab_size=vocab_size,
        )
        self._servers[server.server_id] = _Outside(server, ref)
        self._tell(ServerSeen(ref, version, True))

    async def _look(self, outside: _Outside) -> None:
        outside.looking = True
        try:
            detail = await self._fault(outside)
        finally:
            outside.looking = False
        if self._servers.get(outside.server.server_id) is not outside:
            return
        if bool(detail) is outside.healthy:
            log.warning("LLM server %s is %s: %s", outside.server.server_id, "not well" if detail else "well", detail)
        outside.healthy, outside.detail = not detail, detail
        self._tell(ServerSeen(outside.ref, outside.ref.weight_version, outside.healthy))

    async def _fault(self, outside: _Outside) -> str:
        """In its model and vocabulary, and in what it generates: that is asked when it was not well, after trouble, and at
        every ``_LOOKS_TO_GENERATE``-th look, for it takes its time from rollouts. One that was well may be busy with these,
        and has as long as a turn. Empty: none."""
        from prorl_hpc.inference.outside_probe import probe

        server = replace(outside.server, model=outside.ref.model)  # under this name, whatever else it serves now
        outside.looks += 1
        generate = outside.doubted or not outside.healthy or outside.looks % _LOOKS_TO_GENERATE == 0
        outside.doubted = False
        limit_s = self._turn_s if generate and outside.healthy else None
        try:
            probed = await probe(server, self._model_path(server.policy), generate=generate, limit_s=limit_s)
        except InferenceError as error:
            return str(error)
        # one that was restored could not be asked before
        outside.ref = replace(outside.ref, model=probed.model, vocab_size=probed.vocab_size)
        return ""
