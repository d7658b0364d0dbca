"""The worker's end of the tool server's connection.

One connection for the sandbox's whole life, any number of calls at once. A call that is cancelled here is cancelled
there too, so the sandbox is usable again at once. What comes back is checked: the other end is not ours to trust.
"""

from __future__ import annotations

import asyncio
import itertools
import json
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
_READ_BYTES = 1 << 18
_LOOK_S = 1.0
"""How often overdue answers are looked for."""


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


def _header(header: dict[str, Any]) -> bytes:
    try:
        return _encode(header)
    except UnicodeEncodeError:  # a model wrote half a surrogate pair, or a file's name is no UTF-8
        return json.dumps(header).encode()


@dataclass(frozen=True)
class Response:
    header: Header
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class _Waiting:
    """A call whose answer has not come. ``due`` in the loop's time."""

    __slots__ = ("answer", "due", "timeout_s", "tool")

    def __init__(self, answer: asyncio.Future[Response], tool: str, timeout_s: float, due: float) -> None:
        self.answer = answer
        self.tool = tool
        self.timeout_s = timeout_s
        self.due = due


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Header).decode


def read_header(data: bytes) -> Header:
    """BadFrame when it is not what a tool server says."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise framing.BadFrame(f"the header is none of a tool server: {error}") from None


class ToolClient(asyncio.BufferedProtocol):
    """Speaks to one tool server; make it with ``connect``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._decoder = framing.Decoder(read_header)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._broken = ""
        self._lost = asyncio.Event()
        self._watch: asyncio.TimerHandle | None = None

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

    @property
    def broken(self) -> str:
        """Why there will be no more answers; empty while there may be."""
        return self._broken

    async def greet(self, settings: dict[str, Any], timeout_s: float = 60.0) -> None:
        """Hand over the settings; returns when the shell answers. SandboxError with the server's reason if not."""
        await self._exchange(0, {"hello": framing.VERSION, "settings": settings}, b"", "the greeting", timeout_s)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float, body: bytes = b"") -> Response:
        """SandboxError when the server is gone, does not answer, or could not carry out the call."""
        number = next(self._numbers)
        header = {"id": number, "tool": tool, "arguments": arguments, "timeout_s": timeout_s}
        try:
            response = await self._exchange(number, header, body, tool, timeout_s)
        except asyncio.CancelledError:
            if self._transport is not None and not self._broken:
                self._transport.write(framing.encode({"cancel": number}))
            raise
        if response.header.error:
            raise SandboxError(response.header.error)
        return response

    async def close(self) -> None:
        self._fail("the sandbox was stopped")
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
            await self._lost.wait()

    async def _exchange(
        self, number: int, header: dict[str, Any], body: bytes, tool: str, timeout_s: float
    ) -> Response:
        if self._broken or self._transport is None:
            raise SandboxError(self._broken or "not connected")
        try:
            frame = framing.pack(_header(header), body)
        except (framing.BadFrame, RecursionError) as error:
            raise SandboxError(f"the call is too large: {error}") from None
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._waiting[number] = _Waiting(answer, tool, timeout_s, self._loop.time() + timeout_s + ANSWER_GRACE_S)
        if self._watch is None:
            self._watch = self._loop.call_later(_LOOK_S, self._look_for_overdue)
        self._transport.write(frame)
        try:
            return await answer
        finally:
            del self._waiting[number]

    # asyncio.BufferedProtocol: a new buffer for each read would cost as much as the read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for header, body in self._decoder.feed(bytes(self._buffer[:nbytes])):
                if header.ended:
                    self._fail(f"the sandbox ended: {header.ended}")
                waiting = self._waiting.get(header.id)
                if waiting is not None and not waiting.answer.done():
                    waiting.answer.set_result(Response(header, body))
        except framing.BadFrame as error:
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

    def _look_for_overdue(self) -> None:
        """One timer for all calls: one each would cost as much as the rest of a call here."""
        now = self._loop.time()
        self._watch = self._loop.call_later(_LOOK_S, self._look_for_overdue) if self._waiting else None
        for waiting in self._waiting.values():
            if now >= waiting.due:
                after_s = waiting.timeout_s + ANSWER_GRACE_S
                self._fail(f"the tool server gave no answer to {waiting.tool} within {after_s:.0f} s")
                return

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(SandboxError(self._broken))
