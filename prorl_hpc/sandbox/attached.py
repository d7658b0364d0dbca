"""A sandbox that is one directly attached child process, running the tool server.

The child's stdin is the leash: it ends when this process ends, even by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import psutil

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.cgroups import Group
from prorl_hpc.sandbox.directories import Box, remove_tree
from prorl_hpc.sandbox.leftovers import kill_marked, left_of_session, mounts_below
from prorl_hpc.sandbox.protocol import SandboxStats, ToolResult
from prorl_hpc.sandbox.tool_client import Response, ToolClient

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
FILE_TIMEOUT_S = 60.0
END_S, TERM_S, KILL_S = 3.0, 3.0, 3.0
"""How long each step of an ending may take: EOF on stdin, SIGTERM, SIGKILL to the group."""


@dataclass(frozen=True)
class ServerSettings:
    """The first frame to the tool server."""

    root: str
    """The workspace, as the server sees it."""
    scratch: str
    """A directory of the server's own, for sockets and the like; short."""
    env: dict[str, str]
    inherit_env: bool
    """Whether shells also get the server's own environment: that of the image."""
    output_limit_bytes: int
    strip_ansi: bool = True
    ipython_mode: str = "inprocess"
    open_paths: bool = False
    """Whether file tools may leave the workspace."""
    limits: dict[str, int] = field(default_factory=dict)
    shell: str = "own"
    tmux_poll_s: float = 0.5


class AttachedSandbox:
    """One sandbox: its child process, its connection, its directory."""

    def __init__(
        self,
        sandbox_id: str,
        box: Box,
        process: asyncio.subprocess.Process,
        make_group: Callable[[], Group | None] = lambda: None,
    ) -> None:
        self._id = sandbox_id
        self._box = box
        self._process = process
        self._make_group = make_group
        self._group: Group | None = None
        self._oom_kills = 0
        self._client: ToolClient | None = None
        self._server: psutil.Process | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def sandbox_id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        """Of its process on the node, and of the session that this has opened."""
        return self._process.pid

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def alive(self) -> bool:
        """Whether its tool server runs at this moment, and can be reached."""
        lost = self._stopped or self._client is None or self._client.broken
        return not lost and self._server is not None and _runs(self._server)

    async def ended(self) -> None:
        """Returns when its process has ended, by ``stop`` or by itself."""
        await self._process.wait()

    def name(self, sandbox_id: str) -> None:
        """Give one that was started before it was asked for its id."""
        self._id = sandbox_id

    async def attach(self, settings: ServerSettings, timeout_s: float) -> None:
        """Hand over the settings, connect, and get the tool server's answer. SandboxError with the reason if there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(settings)
        except TimeoutError:
            raise SandboxError(f"it was not ready within {timeout_s:g} s: {self._last_words()}") from None
        except (OSError, ValueError) as error:  # ValueError: a line without end
            raise SandboxError(f"it ended while starting ({error}): {self._last_words()}") from error

    async def _connect(self, settings: ServerSettings) -> None:
        assert self._process.stdout is not None
        while (line := await self._process.stdout.readline()) != b"ready\n":  # an image may print something first
            if not line:
                code = await self._process.wait()
                raise SandboxError(f"its process ended with exit code {code}: {self._last_words()}")
        self._client = await ToolClient.connect(self._box.socket)
        with contextlib.suppress(psutil.NoSuchProcess):  # then the greeting says so
            self._server = psutil.Process(self._client.server_pid)
        self._group = self._make_group()
        if self._group is not None:  # before it starts anything: what it starts is born there
            await asyncio.to_thread(self._group.add, self._client.server_pid)
        await self._client.greet(asdict(settings))

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        return await self._agents_call(tool, arguments, timeout_s)

    async def exec(self, argv: Sequence[str], timeout_s: float, *, cwd: str = "", stdin: bytes = b"") -> ToolResult:
        arguments = {"argv": list(argv), "cwd": cwd}
        return await self._agents_call("exec", arguments, timeout_s, stdin)

    async def _agents_call(
        self, tool: str, arguments: dict[str, Any], timeout_s: float, body: bytes = b""
    ) -> ToolResult:
        """What the kernel did for the memory limit meanwhile is said in the result, or in the reason."""
        try:
            result = _result(await self._connected().call(tool, arguments, timeout_s, body))
        except SandboxError as error:
            if said := self._oom_killed():
                raise SandboxError(f"{error}: {said}") from error
            raise
        if said := self._oom_killed():
            newline = "\n" if result.output and not result.output.endswith("\n") else ""
            return replace(result, output=f"{result.output}{newline}[{said}: the kernel killed a process]\n")
        return result

    def _oom_killed(self) -> str:
        """Why the kernel has killed a process since the last look; empty if it has not."""
        if self._group is None:
            return ""
        before, self._oom_kills = self._oom_kills, self._group.oom_kills()
        return self._group.memory_reason() if self._oom_kills > before else ""

    async def upload(self, path: str, content: bytes) -> None:
        for start in range(0, max(1, len(content)), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            await self._own_call("upload", {"path": path, "append": start > 0}, chunk)

    async def download(self, path: str) -> bytes:
        content = bytearray()
        while True:
            where = {"path": path, "offset": len(content), "length": CHUNK_BYTES}
            chunk = (await self._own_call("download", where)).body
            content += chunk
            if len(chunk) < CHUNK_BYTES:
                return bytes(content)

    async def stats(self) -> SandboxStats:
        return msgspec.json.decode((await self._own_call("stats", {})).body, type=SandboxStats)

    async def _own_call(self, tool: str, arguments: dict[str, Any], body: bytes = b"") -> Response:
        """A call of the worker's, not the agent's: what the server refuses is an error."""
        response = await self._connected().call(tool, arguments, FILE_TIMEOUT_S, body)
        if response.header.exit_code != 0:
            raise SandboxError(f"{tool} in sandbox {self._id}: {response.text.strip()}")
        return response

    def _connected(self) -> ToolClient:
        if self._client is None or self._stopped:
            raise SandboxError(f"sandbox {self._id} was stopped")
        return self._client

    def _last_words(self) -> str:
        return self._box.last_words() or "it said nothing"

    async def stop(self) -> None:
        """One ending for all who ask; it goes on when they are cancelled. What failed is tried again by the next."""
        if self._stopped:
            return
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        began = time.time()
        clean = await self._end_process()
        await asyncio.to_thread(self._remove, clean, began)
        self._stopped = True

    def _remove(self, clean: bool, began: float) -> None:
        """What is left of it, and the proof that nothing is. SandboxError when something stays."""
        if not clean:  # the server did not see to its own descendants
            killed = kill_marked(self._box.path)
            log.warning("sandbox %s did not end by itself; processes killed: %s", self._id, killed or "none")
        _end_helpers(self._process.pid, began)
        if self._group is not None:
            self._group.remove()
        if mounts := mounts_below(self._box.path):
            raise SandboxError(f"sandbox {self._id} has left mounts: {mounts}: unmount them by hand")
        remove_tree(self._box.path)

    async def _end_process(self) -> bool:
        """EOF, SIGTERM, SIGKILL, each with its time; True when EOF was enough. SandboxError when nothing was."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if await self._ended_within(END_S):
            return self._process.returncode == 0
        self._signal(signal.SIGTERM)
        if await self._ended_within(TERM_S):
            return False
        self._signal(signal.SIGKILL)
        if await self._ended_within(KILL_S):
            return False
        raise SandboxError(f"sandbox {self._id} does not end: process {self._process.pid} or its tool server is left")

    async def _ended_within(self, timeout_s: float) -> bool:
        """The child is reaped, and the tool server, which may be in another PID namespace, is gone as well."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
                if self._server is not None:
                    await _gone(self._server)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number is signal.SIGKILL and self._server is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._server.kill()


def _end_helpers(session: int, before: float) -> None:
    """FUSE servers of a launcher that was killed. They end by themselves otherwise, at most a moment after it.
    ``before``: what began later is in a session that got the number anew."""
    for signals in ((), (signal.SIGTERM,), (signal.SIGKILL,)):
        give_up = time.monotonic() + 1.0
        while left := left_of_session(session, before):
            for pid, number in itertools.product(left, signals):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if time.monotonic() > give_up:
                break
            time.sleep(0.005)
        else:
            return
    raise SandboxError(f"processes of a sandbox do not end, not even by SIGKILL: {left}")


def _result(response: Response) -> ToolResult:
    got = response.header
    return ToolResult(
        response.text, got.exit_code, got.timed_out, got.seconds, running=got.running, cwd=got.cwd, files=got.files
    )


async def _gone(process: psutil.Process) -> None:
    while _runs(process):  # noqa: ASYNC110  (no event for it before Linux 5.3)
        await asyncio.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
