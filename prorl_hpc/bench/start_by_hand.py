"""The floor of a sandbox's start: one ``apptainer exec`` by hand, with our isolation, until what it runs answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prorl_hpc.bench.sandbox_bed import PEERS
from prorl_hpc.messages.errors import RunError
from prorl_hpc.sandbox.apptainer import isolation_flags, launcher_environment
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.directories import Box
from prorl_hpc.sandbox.host_image import make_host_image

_ANSWER_S = 30.0
_END_S = 10.0
_SERVER = ("python3", "/workspace/echo_server.py", "/workspace/socket")
# Python that loads nothing that it need not, and is no server: the least that could be called an answer.
_LEAST = ("python3", "-I", "-S", "-c", "print(input())")


class ByHand:
    """The ``host`` image in ``directory``, and containers of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workspace = directory / "work"
        self._workspace.mkdir(parents=True)
        shutil.copy(PEERS / "echo_server.py", self._workspace)
        self._image = directory / "image"
        self._binds = [f"{self._workspace}:/workspace", *(f"{p}:{p}:ro" for p in make_host_image(self._image))]

    async def server(self) -> float:
        """Seconds until a ten-line echo server on a Unix socket has answered. RunError with the container's words."""
        began = time.perf_counter()
        async with self._container(_SERVER) as process:
            await _line(process, b"ready\n")
            reader, writer = await asyncio.open_unix_connection(self._workspace / "socket")
            writer.write(b"hello\n")
            await reader.readline()
            seconds = time.perf_counter() - began
            writer.close()
            (self._workspace / "socket").unlink()
        return seconds

    async def least(self) -> float:
        """Seconds until a program without socket has given back a line of its stdin."""
        began = time.perf_counter()
        async with self._container(_LEAST) as process:
            assert process.stdin
            process.stdin.write(b"hello\n")
            await _line(process, b"hello\n")
            return time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def _container(self, command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
        """It is waited for at the end."""
        binary = find_binary()
        argv = [binary, "-q", "-s", "exec", *isolation_flags("none")]
        for bind in self._binds:
            argv += ["--bind", bind]
        env = launcher_environment(binary, Box(self._directory))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, str(self._image), *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
        try:
            async with asyncio.timeout(_ANSWER_S):
                yield process
            async with asyncio.timeout(_END_S):
                await process.communicate()
        except TimeoutError:
            raise RunError("a container that was started by hand gave no answer, or did not end") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()


async def _line(process: asyncio.subprocess.Process, expected: bytes) -> None:
    assert process.stdout and process.stderr
    if await process.stdout.readline() != expected:
        words = (await process.stderr.read()).decode(errors="replace").strip()
        raise RunError(f"a container that was started by hand gave no answer: {words[-500:]}")
