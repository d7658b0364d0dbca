"""The gateway of a worker process: an HTTP server on a Unix socket, and the sessions of the rollouts in RUN."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.gateway.app import PING_S, make_app
from prorl_hpc.gateway.door import IDLE_S, MOST_WAITING, door_protocol
from prorl_hpc.gateway.session import Session
from prorl_hpc.gateway.strands import Limits
from prorl_hpc.observe.http_server import HttpServer, unix_listener
from prorl_hpc.tasks.protocol import RolloutContext


class Gateway:
    """``start`` listens on ``socket``, mode 0600; ``close`` ends all sessions. Outside agents reach it with the key of
    an open session only."""

    def __init__(self, socket: Path, *, ping_s: float = PING_S, idle_s: float = IDLE_S) -> None:
        """``idle_s``: how long a connection may be without a request."""
        self.socket = socket
        self._idle_s = idle_s
        self._ping_s = ping_s
        self._sessions: dict[str, Session] = {}
        self._server: HttpServer | None = None

    async def start(self) -> None:
        """Raises OSError if the socket cannot be made."""
        app = make_app(self._sessions.get, self._ping_s)
        protocol = door_protocol(self._idle_s)
        self._server = HttpServer(app, unix_listener(self.socket), http=protocol, backlog=MOST_WAITING)
        await self._server.start()

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        self._sessions.clear()
        if self._server is not None:
            await self._server.stop()
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
