"""The worker's end, against tool servers that misbehave."""

from __future__ import annotations

import asyncio
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import tool_client
from prorl_hpc.sandbox.tool_client import ToolClient
from prorl_hpc.sandbox.tools import framing

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def frame_from(reader: asyncio.StreamReader) -> dict[str, object]:
    head, body = struct.unpack(">II", await reader.readexactly(8))
    header = framing.read_header(await reader.readexactly(head))
    await reader.readexactly(body)
    return header


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[ToolClient]:
    directory = Path(tempfile.mkdtemp(prefix="prorl-test-", dir="/tmp"))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client hung up, as some of these tests have it
        finally:
            writer.close()

    server = await asyncio.start_unix_server(accept, str(directory / "s"))
    client = await ToolClient.connect(directory / "s")
    try:
        yield client
    finally:
        await client.close()
        server.close()
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        framing.pack(b"no json", b""),
        framing.pack(b"[1, 2]", b""),
        framing.pack(b'{"id": "one"}', b""),
        framing.pack(b'{"id": 1, "exit_code": 1e400}', b""),
        framing.pack(b'{"id": 1, "exit_code": "0"}', b""),
        framing.pack(b'{"id": 1, "files": [1]}', b""),
        framing.pack(b'{"id": 1, "cwd": "\xff"}', b""),
        framing.pack(b'{"x": ' + b"[" * 100_000, b""),
        framing.pack(b"\xff\xfe", b""),
    ],
)
async def test_garbage_is_an_error_for_every_call(garbage: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame_from(reader)
        await frame_from(reader)
        writer.write(garbage)
        await reader.read()

    async with connected(serve) as client:
        calls = [client.call("bash", {"command": "true"}, 20) for _ in range(2)]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, SandboxError) and "connection to the tool server broke" in str(result)
        with pytest.raises(SandboxError, match="broke"):
            await client.call("bash", {"command": "true"}, 20)


async def test_answers_come_out_of_order_and_in_pieces() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        numbers = [(await frame_from(reader))["id"] for _ in range(3)]
        answers = b"".join(framing.encode({"id": n, "seconds": 1.5}, f"{n}".encode()) for n in reversed(numbers))
        for byte in framing.encode({"id": 999}) + answers:
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.read()

    async with connected(serve) as client:
        responses = await asyncio.gather(*(client.call("bash", {}, 20) for _ in range(3)))
        assert [response.text for response in responses] == ["1", "2", "3"]
        assert responses[0].header.seconds == 1.5


async def test_an_end_and_its_reason_reach_every_call() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame_from(reader)
        writer.write(framing.encode({"ended": "it got SIGTERM"}))

    async with connected(serve) as client:
        with pytest.raises(SandboxError, match="it got SIGTERM"):
            await client.call("bash", {}, 20)


async def test_a_server_that_hangs_up_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frame_from(reader)

    async with connected(serve) as client:
        with pytest.raises(SandboxError, match="tool server ended"):
            await client.call("bash", {}, 20)


async def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_client, "ANSWER_GRACE_S", 0.05)
    monkeypatch.setattr(tool_client, "_LOOK_S", 0.02)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(serve) as client:
        with pytest.raises(SandboxError, match="no answer to bash"):
            await client.call("bash", {}, 0.05)


async def test_a_cancelled_call_is_cancelled_there_and_the_others_go_on() -> None:
    seen: list[dict[str, object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            seen.append(await frame_from(reader))
        writer.write(framing.encode({"id": 1}, b"late") + framing.encode({"id": 2}, b"fine"))
        await reader.read()

    async with connected(serve) as client:
        first, second = (asyncio.create_task(client.call("bash", {}, 20)) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        assert (await second).text == "fine"
        assert seen[2] == {"cancel": 1}
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_a_call_too_large_is_refused_here() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(serve) as client:
        with pytest.raises(SandboxError, match="too large"):
            await client.call("bash", {"command": "x" * framing.MAX_HEADER_BYTES}, 20)
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(SandboxError, match="too large"):
            await client.call("exec", {"argv": nested}, 5)
        assert client._waiting == {}
