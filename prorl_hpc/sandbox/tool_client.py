"""The worker's end of the tool server's connection.

One connection for the sandbox's whole life, any number of calls at once. A call that is cancelled here is cancelled
there too, so the sandbox is usable again at once. What comes back is checked: the other end is not ours to trust.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.tools import framing

ANSWER_GRACE_S = 15.0
"""How much longer than the call's own timeout an answer may take before the sandbox counts as broken."""


class Header(msgspec.Struct, frozen=True):
    """The header of a frame from the tool server; ``error`` is empty when the call was carried out."""

    id: int = 0
    hello: int = 0
    ended: str = ""
    error: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    running: bool = False
    cwd: str = ""
    files: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Response:
    header: Header
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class ToolClient(asyncio.Protocol):
    """Speaks to one tool server; make it with ``connect``."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._decoder = framing.Decoder()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._broken = ""
        self._lost = asyncio.Event()

    @classmethod
    async def connect(cls, path: Path) -> ToolClient:
        """OSError when nobody listens there."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, str(path))
        return client

    @property
    def server_pid(self) -> int:
        """The server's process id as this process sees it, whatever PID namespace the server is in."""
        assert self._transport is not None
        peer: socket.socket = self._transport.get_extra_info("socket")
        pid: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid

    async def greet(self, settings: dict[str, Any]) -> None:
        """Hand over the settings; returns when the shell answers. SandboxError with the server's reason if not."""
        await self._exchange(0, {"hello": framing.VERSION, "settings": settings}, b"")

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float, body: bytes = b"") -> Response:
        """SandboxError when the server is gone, does not answer, or could not carry out the call."""
        number = next(self._numbers)
        frame = {"id": number, "tool": tool, "arguments": arguments, "timeout_s": timeout_s}
        watch = asyncio.get_running_loop().call_later(timeout_s + ANSWER_GRACE_S, self._silent, tool, timeout_s)
        try:
            response = await self._exchange(number, frame, body)
        except asyncio.CancelledError:
            if self._transport is not None and not self._broken:
                self._transport.write(framing.encode({"cancel": number}))
            raise
        finally:
            watch.cancel()
        if response.header.error:
            raise SandboxError(response.header.error)
        return response

    async def close(self) -> None:
        self._fail("the sandbox was stopped")
        if self._transport is not None:
            self._transport.abort()
            await self._lost.wait()

    async def _exchange(self, number: int, header: dict[str, Any], body: bytes) -> Response:
        if self._broken or self._transport is None:
            raise SandboxError(self._broken or "not connected")
        try:
            frame = framing.encode(header, body)
        except framing.BadFrame as error:
            raise SandboxError(f"the call is too large: {error}") from None
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(frame)
        try:
            return await answer
        finally:
            del self._waiting[number]

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame, body in self._decoder.feed(data):
                header = msgspec.convert(frame, Header)
                if header.ended:
                    self._fail(f"the sandbox ended: {header.ended}")
                answer = self._waiting.get(header.id)
                if answer is not None and not answer.done():
                    answer.set_result(Response(header, body))
        except (framing.BadFrame, msgspec.ValidationError) as error:
            self._fail(f"the connection to the tool server broke: {error}")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(
            f"the connection to the tool server broke: {error}"
            if error
            else "the tool server ended: it was killed, or the sandbox ran out of memory"
        )
        self._lost.set()

    def _silent(self, tool: str, timeout_s: float) -> None:
        self._fail(f"the tool server gave no answer to {tool} within {timeout_s + ANSWER_GRACE_S:.0f} s")

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(self._broken))
