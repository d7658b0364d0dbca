"""One ``vllm serve`` process: started, watched until it answers, ended with proof.

It leads its own process group, and its environment carries a mark, so that ending it reaches vLLM's own children too,
those in other sessions as well.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from prorl_hpc.inference.ports import PortBlock
from prorl_hpc.inference.server_kin import MARK, ServerKin
from prorl_hpc.inference.vllm_settings import VllmSettings
from prorl_hpc.messages.errors import InferenceError

TERM_GRACE_S = 2.0
"""What vLLM gets to clean up after SIGTERM; it holds nothing worth more of the run's last seconds."""
_KILL_GRACE_S = 5.0
_POLL_S = 0.25
_POLL_GROUP_S = 0.02

_MILESTONES = [
    (re.compile("Starting to load model"), "loading the model"),
    (re.compile("Loading (?:weights|safetensors)"), "loading the weights"),
    (re.compile("Capturing CUDA graph|Compiling a graph"), "compiling"),
    (re.compile("KV cache size|init engine .* took"), "warming up"),
    (re.compile("Started server process|Starting vLLM server"), "opening its door"),
]


def last_lines(path: Path, count: int = 12, limit_bytes: int = 8192) -> str:
    """The end of a log, without progress bars; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line][-count:])


def group_alive(pgid: int) -> bool:
    """Whether any process of the group exists, zombies that nobody has waited for included."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


class VllmProcess:
    """``log`` is appended to; a new object for each start."""

    def __init__(self, settings: VllmSettings, log: Path) -> None:
        self.settings = settings
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._mark = secrets.token_hex(8)
        self._ports: PortBlock | None = None
        self._kin = ServerKin(self._mark)

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def claim_ports(self) -> PortBlock:
        """Those of the server's own, until it is stopped. InferenceError if there are none."""
        self._ports = self._ports or PortBlock.claim()
        return self._ports

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start and wait until /health answers. InferenceError with the log's last lines if it does not."""
        socket = self.settings.socket
        socket.unlink(missing_ok=True)
        self.settings.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log_offset = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.settings.command(),
                env={**self.settings.environment(self.claim_ports().first), MARK: self._mark},
                stdin=asyncio.subprocess.PIPE,  # held open: its end is how the launcher knows that we are gone
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await self._until_healthy(progress, log_offset)
            await self.note_kin()
        except BaseException:
            await self.stop()
            raise

    async def _until_healthy(self, progress: Callable[[str], None], log_offset: int) -> None:
        assert self._process is not None
        limit_s, began = self.settings.engine.start_timeout_s, time.monotonic()
        connector = aiohttp.UnixConnector(path=str(self.settings.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            while not await self._healthy(session):
                waited_s = time.monotonic() - began
                if self._process.returncode is not None:
                    raise InferenceError(self.obituary("died while it was starting"))
                if waited_s > limit_s:
                    raise InferenceError(
                        self.obituary(f"did not answer within engine.start_timeout_s={limit_s:.0f} seconds")
                    )
                progress(f"vLLM: {self._milestone(log_offset)} ({waited_s:.0f} s)")
                await asyncio.sleep(_POLL_S)

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        if not self.settings.socket.exists():
            return False
        try:
            async with session.get("http://vllm/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _milestone(self, log_offset: int) -> str:
        """What the log of this start says it is doing."""
        with self.log.open("rb") as file:
            file.seek(log_offset)
            text = file.read().decode(errors="replace")
        reached = [(found[-1].start(), name) for pattern, name in _MILESTONES if (found := [*pattern.finditer(text)])]
        return max(reached)[1] if reached else "importing"

    def obituary(self, what: str) -> str:
        """A message that names the log and quotes its end."""
        code = self._process.returncode if self._process is not None else None
        status = "" if code is None else f" (exit status {code})"
        return f"the vLLM server {what}{status}; the last lines of {self.log}:\n{last_lines(self.log)}"

    async def wait(self) -> int:
        """Until the server process ends; its exit status."""
        assert self._process is not None, "started"
        return await self._process.wait()

    def kill(self) -> None:
        """At once, with all that it has started; ``wait`` returns then."""
        if self._process is not None and group_alive(self._process.pid):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL, to the whole group, and SIGKILL to what has left it; returns when all are gone, else
        raises InferenceError that names them. Idempotent."""
        if self._ports is not None:
            self._ports.close()
            self._ports = None
        if self._process is None:
            return
        await self.note_kin()
        pgid = self._process.pid
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
            if group_alive(pgid):
                os.killpg(pgid, number)
            for _ in range(int(grace_s / _POLL_GROUP_S)):
                if not group_alive(pgid):
                    break
                await asyncio.sleep(_POLL_GROUP_S)
        self.settings.socket.unlink(missing_ok=True)
        if group_alive(pgid):
            raise InferenceError(f"processes of the vLLM server's group {pgid} are still there after SIGKILL")
        await self._process.wait()
        await self._end_kin()

    async def _end_kin(self) -> None:
        """Looking takes a while on a node with many processes, so not in the event loop."""
        deadline = time.monotonic() + _KILL_GRACE_S
        while left := await asyncio.to_thread(self._kin.kill):
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in left)
                raise InferenceError(f"processes of the vLLM server are still there after SIGKILL: {pids}")
            await asyncio.sleep(_POLL_GROUP_S)
        self._kin.remove_shared_memory()

    async def note_kin(self) -> None:
        """While there is somebody to ask: what the killed leave is known to nobody else."""
        if self._process is not None:
            await asyncio.to_thread(self._kin.look, self._process.pid)
