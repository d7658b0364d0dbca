"""An HTTP server inside a process of the run, which keeps its signals and its event loop to itself."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

_GRACE_S = 1
"""How long answers may still take when the server ends."""


class _Server(uvicorn.Server):
    """Leaves the signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """``start`` and ``stop`` it in a running event loop. ``settings``: more of uvicorn's."""

    def __init__(self, app: ASGIApp, listener: socket.socket, **settings: Any) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",  # at a start it says "error" and nothing of where it listens
                access_log=False,
                lifespan="off",
                loop="none",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                **settings,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it takes calls."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended before it listened")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends its connections; idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def unix_listener(path: Path) -> socket.socket:
    """Listening at ``path``, mode 0600 from its first moment on; what an earlier process left there is replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(stat.S_IXUSR | stat.S_IRWXG | stat.S_IRWXO)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(1024)
    return listener
