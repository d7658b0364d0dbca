"""Serves the HTTP API: on a Unix socket always, on TCP with a token if asked."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp

from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.http_server import HttpServer, unix_listener
from prorl_hpc.service.app import PROCESS_TIMEOUT_S, make_app
from prorl_hpc.service.bearer_token import BearerToken
from prorl_hpc.service.protocol import RolloutService

log = logging.getLogger(__name__)


class HttpFace:
    """``async with HttpFace(…) as face``: listening when entered; ``face.url`` is the TCP address or empty."""

    def __init__(
        self,
        service: RolloutService,
        socket_path: Path,
        *,
        tcp_host: str | None,
        token: str,
        tcp_ports: Sequence[int] = (0,),
        process_timeout_s: float = PROCESS_TIMEOUT_S,
        **app_settings: Any,
    ) -> None:
        """``tcp_host``: the address to listen on; None: no TCP. ``tcp_ports``: those to try in order, 0 for one that
        the system chooses; RunError when none is free.
        ``process_timeout_s``: what a job of /process may take in its stages (rollout.total_s); it is ended after
        2 × this + 10 seconds. ``app_settings``: the others of make_app."""
        self._app = make_app(service, process_timeout_s=process_timeout_s, **app_settings)
        self._socket_path = socket_path
        self._tcp_host = tcp_host
        self._tcp_ports = tcp_ports
        self._token = token
        self._servers: list[HttpServer] = []
        self.url = ""

    async def __aenter__(self) -> HttpFace:
        listener = None if self._tcp_host is None else _tcp_socket(self._tcp_host, self._tcp_ports)
        await self._serve(self._app, unix_listener(self._socket_path))
        if listener is not None:
            self.url = "http://{}:{}".format(*listener.getsockname()[:2])
            await self._serve(BearerToken(self._app, self._token, self._app.state.http_metrics.refused), listener)
        log.info("the HTTP API is at %s%s", self._socket_path, f" and {self.url}" if self.url else "")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._socket_path.unlink(missing_ok=True)

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        server = HttpServer(app, listener)
        self._servers.append(server)
        await server.start()


def _tcp_socket(host: str, ports: Sequence[int]) -> socket.socket:
    """Listening at the first of ``ports`` that is free."""
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=1024)
        except OSError as error:
            failed = error
    asked = ", ".join(map(str, ports))
    raise RunError(
        f"the HTTP API cannot listen on {host}, port {asked}: {failed}. Set rollout.http_port to another port"
    )
