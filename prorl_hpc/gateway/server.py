"""The gateway of a worker process: an HTTP server on a Unix socket, and the sessions of the rollouts in RUN."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.gateway.app import PING_S, make_app
from prorl_hpc.gateway.door import IDLE_S, MOST_WAITING, door_protocol
from prorl_hpc.gateway.session import Session
from prorl_hpc.gateway.strands import Limits
from prorl_hpc.tasks.protocol import RolloutContext

log = logging.getLogger(__name__)

_GRACE_S = 1
"""How long answers may still take when the gateway ends."""


class _Server(uvicorn.Server):
    """Leaves the signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """``start`` listens on ``socket``, mode 0600; ``close`` ends all sessions. Outside agents reach it with the key of
    an open session only."""

    def __init__(self, socket: Path, *, ping_s: float = PING_S, idle_s: float = IDLE_S) -> None:
        """``idle_s``: how long a connection may be without a request."""
        self.socket = socket
        self._idle_s = idle_s
        self._ping_s = ping_s
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError if the socket cannot be made."""
        listener = _unix_socket(self.socket)
        config = uvicorn.Config(
            make_app(self._sessions.get, self._ping_s),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="none",
            http=door_protocol(self._idle_s),
            backlog=MOST_WAITING,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the gateway's HTTP server ended before it listened")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        self._sessions.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self.socket.unlink(missing_ok=True)

    def open_session(
        self,
        context: RolloutContext,
        chat: ChatFormat,
        *,
        max_calls: int,
        tool_format: ToolFormat | None = None,
        max_context_tokens: int = 0,
        max_tokens: int = 0,
        calls_setting: str = "agent.max_calls",
    ) -> Session:
        """For a rollout in RUN; the first conversation that its agent begins is ``context.conversation``, further ones are
        put into ``context.branches``. ``tool_format``: another than the model's template teaches. The limits are those of
        gateway.strands.Limits. Whoever opens a session closes it, before the trajectory is read."""
        session = Session(
            context,
            chat,
            tool_format or get_tool_format(chat.tool_format),
            Limits(max_calls, calls_setting, max_context_tokens, max_tokens),
            self._sessions,
        )
        self._sessions[session.key] = session
        return session


def _unix_socket(path: Path) -> socket.socket:
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
