"""The worker's end of the tool server's connection.

One connection for the sandbox's whole life; one call at a time. A call that is cancelled here is cancelled there
too, so the sandbox is usable again at once. What comes back is checked: the other end is not ours to trust.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.messages.errors import SandboxError

ANSWER_GRACE_S = 15.0
"""How much longer than the call's own timeout an answer may take before the sandbox counts as broken."""
LINE_LIMIT_BYTES = 16 << 20


class Response(msgspec.Struct, frozen=True):
    """A line from the tool server; ``error`` is empty when the call was carried out."""

    id: int
    output: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0
    error: str = ""


class ToolClient:
    """Speaks to one tool server; make it with ``connect``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._turn = asyncio.Lock()
        self._broken = ""
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: Path) -> ToolClient:
        """OSError when nobody listens there."""
        return cls(*await asyncio.open_unix_connection(path, limit=LINE_LIMIT_BYTES))

    @property
    def server_pid(self) -> int:
        """The server's process id as this process sees it, whatever PID namespace the server is in."""
        peer: socket.socket = self._writer.get_extra_info("socket")
        pid: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> Response:
        """SandboxError when the server is gone, does not answer, or could not carry out the call."""
        async with self._turn:
            if self._broken:
                raise SandboxError(self._broken)
            number = next(self._numbers)
            answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
            self._waiting[number] = answer
            try:
                async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                    await self._send({"id": number, "tool": tool, "arguments": arguments, "timeout_s": timeout_s})
                    response = await answer
            except TimeoutError:
                self._fail(f"the tool server gave no answer to {tool} within {timeout_s + ANSWER_GRACE_S:.0f} s")
                raise SandboxError(self._broken) from None
            except asyncio.CancelledError:
                self._writer.write(json.dumps({"cancel": number}).encode() + b"\n")
                raise
            finally:
                self._waiting.pop(number, None)
        if response.error:
            raise SandboxError(response.error)
        return response

    async def close(self) -> None:
        self._fail("the sandbox was stopped")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # the server was quicker: closed is closed

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            self._fail(f"the tool server is gone: {error}")

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                response = msgspec.json.decode(line, type=Response)
                answer = self._waiting.get(response.id)
                if answer is not None and not answer.done():
                    answer.set_result(response)
            self._fail("the tool server ended: it was killed, or the sandbox ran out of memory")
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._fail(f"the connection to the tool server broke: {error}")

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(self._broken))
